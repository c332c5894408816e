"""`model.expert_cache`: what a user may ask of a cached model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hotexperts.cache import StreamBanks, warm_start
from hotexperts.cache.packed_store import PackedBackingStore, describe_packing
from hotexperts.cache.quantised import QuantisedStore
from hotexperts.cache.streaming import StreamingProvider
from hotexperts.observe.exporter import LOOPBACK, MetricsServer
from hotexperts.stats import CacheStats, total


@dataclass(frozen=True, repr=False)
class ExpertCache:
    """The caches of one model's layers.

    Attributes:
        names: the experts modules' paths, in layer order.
        providers: their caches, same order.
        capacity: slots a layer.
        policy: its name.
        store: "ram", "file" or "disk".
        held: how host memory is held, as "page-locked"; empty where no GPU reads it.
        mode: who manages them: "host" or "device".
        mode_reason: why "auto" came to the host, as "host: no CUDA device"; else None.
        reason: where the capacity comes from, one line.
        banks: the streaming banks, one pair a layout.
        load_seconds: wall-clock seconds of loading.
        store_reason: why the experts are there, and how many are in memory, as "disk: as asked;
            8 of 64 experts a layer in 1.2 GiB of memory"; None where that was asked for and says
            all.
        prefetch: "router", "lift" or "off".
        model: a digest of some of the model's weights, which another checkpoint has not.
        dequantised: what the checkpoint quantised experts by that became plain as it was read, as
            "GGUF Q4_K, GGUF Q6_K"; empty where nothing was, or fp8 or mxfp4.
    """

    names: tuple[str, ...]
    providers: tuple[StreamingProvider, ...]
    capacity: int
    policy: str
    store: str
    held: str
    mode: str
    mode_reason: str | None
    reason: str
    banks: tuple[StreamBanks, ...]
    load_seconds: float
    store_reason: str | None = None
    prefetch: str = "off"
    model: str | None = None
    dequantised: str = ""

    def __repr__(self) -> str:
        experts = min(provider.store.num_experts for provider in self.providers)
        stats = self.stats
        rate = f"{100 * stats.hit_rate:.1f} % hits" if stats.demands else "not used yet"
        return (
            f"<ExpertCache: {self.capacity} of {experts} experts in each of {len(self.names)} "
            f"layers, {self.policy} run by the {self.mode}, experts in {self.store}, {rate}>"
        )

    @property
    def stats(self) -> CacheStats:
        """Counters summed over layers, a snapshot."""
        return total(provider.stats for provider in self.providers)

    @property
    def slot_nbytes(self) -> int:
        """Device bytes of all slots."""
        return sum(provider.slot_nbytes for provider in self.providers)

    @property
    def bank_nbytes(self) -> int:
        """Device bytes of the banks."""
        return sum(bank.nbytes for bank in self.banks)

    @property
    def lift_nbytes(self) -> int:
        """Device bytes of the tables that guess for a next layer; 0 without."""
        return sum(provider.lift_nbytes for provider in self.providers)

    @property
    def host_nbytes(self) -> int:
        """Host bytes of the stores; 0 where the experts stay in the file."""
        return sum(provider.store.host_nbytes for provider in self.providers)

    @property
    def packing(self) -> str:
        """How bf16 experts are kept: "packed12" where at least one layer packs some, or "none"."""
        return "packed12" if "packed12" in self._kinds() else "none"

    @property
    def expert_dtype(self) -> str:
        """What host memory keeps instead of the slots' dtype: "fp8", "int8", ...; "none"."""
        return next((kind for kind in self._kinds() if kind != "packed12"), "none")

    @property
    def relative_errors(self) -> dict[str, float]:
        """What quantising changed in each layer, in parts of its weights; root mean squares.

        Empty where the experts are not quantised, or were so in the checkpoint.
        """
        stores = [(n, p.store) for n, p in self._by_name().items()]
        return {
            name: store.relative_error
            for name, store in stores
            if isinstance(store, QuantisedStore) and store.relative_error is not None
        }

    def _kinds(self) -> list[str]:
        stores = [provider.store for provider in self.providers]
        packed = [store for store in stores if isinstance(store, PackedBackingStore)]
        return [store.kind for store in packed if store.form.is_packed]

    @property
    def packing_report(self) -> str:
        """What packing came to; empty where nothing was to be packed."""
        return describe_packing([provider.store for provider in self.providers])

    @property
    def expert_nbytes(self) -> int:
        """Bytes of every expert of the model, as resident it would need them."""
        return sum(p.store.num_experts * p.store.layout.nbytes for p in self.providers)

    def save_state(self, path: str | Path) -> None:
        """Write who is in which slot, and what the policy knows, for a warm start; no weights.

        Raises:
            ConfigError: the file cannot be written.
        """
        warm_start.save(path, self._by_name(), self._about())

    def load_state(self, path: str | Path) -> None:
        """Continue from a file of `save_state`: its experts are copied into their slots.

        Raises:
            CheckpointError: the file is none of these, or is damaged.
            ConfigError: it is of another model, policy, mode or number of slots.
        """
        warm_start.load(path, self._by_name(), self._about())

    def serve_metrics(self, port: int = 0, host: str = LOOPBACK) -> MetricsServer:
        """Answer Prometheus with the counters, by the names that the vLLM plug-in has.

        Args:
            port: 0 takes a free one.
            host: who may ask; the default is this machine alone.

        Returns:
            The server: its `url`, and `close()`.

        Raises:
            ConfigError: the address cannot be had.
            ModuleNotFoundError: `prometheus_client` is not installed.
        """
        return MetricsServer(lambda: {0: self.counters()}, port, host)

    def counters(self) -> dict[str, dict[str, int]]:
        """Each layer's counters, a snapshot."""
        return {name: provider.stats.as_dict() for name, provider in self._by_name().items()}

    def _by_name(self) -> dict[str, StreamingProvider]:
        return dict(zip(self.names, self.providers, strict=True))

    def _about(self) -> warm_start.About:
        return warm_start.About(self.policy, self.mode, self.capacity, self.model)

    def reset_stats(self) -> None:
        """Set the counters to zero; the slots keep their experts."""
        for provider in self.providers:
            provider.reset_stats()

    def reset(self) -> None:
        """Empty the slots, and forget the policy's history and the counters."""
        for provider in self.providers:
            provider.reset()
