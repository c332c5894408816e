"""The cache of one layer, device-managed: kernels decide and copy, the host is not asked."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from hotexperts.cache.provider import ExpertWeightResult, Waves
from hotexperts.cache.store import CPUBackingStore
from hotexperts.cache.streaming import StreamingProvider
from hotexperts.cache.transfer import StreamBanks
from hotexperts.cache.turn import Turn
from hotexperts.errors import ConfigError, ExpertCacheOverflow
from hotexperts.formats import ExpertLayout
from hotexperts.kernels.gather import GatherLayout
from hotexperts.kernels.gather.layout import WORD_BYTES
from hotexperts.kernels.plan import DEVICE_POLICIES, Counter, PlanLayout
from hotexperts.kernels.plan.launch import MAX_IDS, PlanGather
from hotexperts.policy import DEFAULT_POLICY
from hotexperts.residency import NOWHERE
from hotexperts.stats import CacheStats


class DeviceWeightProvider(StreamingProvider):
    """Slots, store and policy of one layer; a kernel decides and copies in one launch.

    `prepare` neither allocates anything but its result nor waits for the device, so it can be
    captured in a CUDA graph. A call that may need more experts than there are slots, and a
    prefill, streams through the banks with the host's help and cannot be captured.

    Args:
        store: all experts, page-locked where the device is a GPU.
        capacity: cached slots, 1 to E.
        policy: one that has a kernel.
        device: a CUDA device; a CPU works under Triton's interpreter.
        banks: as for `CachedWeightProvider`.
        turn: as for `CachedWeightProvider`.
        num_programs: programs that copy; few leave the GPU to compute that runs beside.

    Raises:
        ConfigError: a capacity outside 1 to E, a policy without a kernel, or tensors whose size
            is no multiple of four bytes.
    """

    def __init__(
        self,
        store: CPUBackingStore,
        capacity: int,
        *,
        policy: str = DEFAULT_POLICY,
        device: torch.device | str = "cuda",
        banks: StreamBanks | None = None,
        turn: Turn | None = None,
        num_programs: int = 16,
    ) -> None:
        device = torch.device(device)
        check_device_mode(store.layout, policy, device)
        if not 1 <= capacity <= store.num_experts:
            raise ConfigError(
                f"{capacity} slots for {store.num_experts} experts: give 1 to {store.num_experts}"
            )
        if device.type == "cuda" and not store.is_pinned:
            raise ConfigError("the store is not page-locked: make it with pin=True")
        super().__init__(store, capacity, device, banks, turn)
        layout = store.layout
        sizes = tuple(spec.nbytes for spec in layout.specs)
        gather = GatherLayout.of(layout.offsets, sizes, layout.row_nbytes, capacity)
        self.capacity = capacity
        self.buffer = gather.buffer(device)
        self.tensors = _typed(layout, gather, self.buffer, capacity)
        self.plan = PlanLayout(store.num_experts, capacity, policy)
        self.kernel = PlanGather(
            self.plan, gather, store.rows.view(torch.int32), self.buffer, num_programs=num_programs
        )
        self._host_stats = CacheStats()  # of what streamed with the host's help

    def prepare(self, topk_ids: torch.Tensor) -> ExpertWeightResult:
        """Make every demanded expert resident and remap, enqueued on the current stream.

        Raises:
            ExpertCacheOverflow: as many ids may need more experts than there are slots, judged by
                the shape alone.
            ConcurrentUseError: another thread is inside.
        """
        with self._turn.taken():
            if not self._fits(topk_ids):
                needed = min(topk_ids.numel(), self.store.num_experts)
                raise ExpertCacheOverflow(needed, self.capacity)
            return self._at_once(topk_ids)

    def waves(self, topk_ids: torch.Tensor, *, prefill: bool = False) -> Waves:
        """One wave where the shape says that everything fits, else through the banks.

        Raises:
            ExpertCacheOverflow: a large call inside a graph capture, which cannot be served.
            ConcurrentUseError: another thread is inside.
        """
        with self._turn.taken():
            if self._fits(topk_ids) and not prefill:
                yield self._at_once(topk_ids)
            elif self.capacity == self.store.num_experts:
                yield self._in_pieces(topk_ids)
            elif topk_ids.is_cuda and torch.cuda.is_current_stream_capturing():
                needed = min(topk_ids.numel(), self.store.num_experts)
                raise ExpertCacheOverflow(needed, self.capacity)
            else:
                yield from self._with_the_host(topk_ids)

    @property
    def stats(self) -> CacheStats:
        """The counters, a snapshot; waits for the device."""
        counts = self.kernel.counters.cpu().tolist()
        found = CacheStats(
            calls=counts[Counter.CALLS],
            hits=counts[Counter.HITS],
            misses=counts[Counter.MISSES],
            bypasses=counts[Counter.BYPASSES],
            evictions=counts[Counter.EVICTIONS],
            waves=counts[Counter.WAVES],
            bytes_moved=(counts[Counter.MISSES] - counts[Counter.BYPASSES])
            * self.store.layout.nbytes,
        )
        for name, value in self._host_stats.as_dict().items():
            setattr(found, name, getattr(found, name) + value)
        return found

    @property
    def slot_of(self) -> list[int]:
        """Slot of each expert, -1 for none; waits for the device."""
        return self.plan.view(self.kernel.state, "slot_of").cpu().tolist()

    @property
    def slot_nbytes(self) -> int:
        """Device bytes of the slots."""
        return self.buffer.nbytes

    def reset_stats(self) -> None:
        """Set the counters to zero, in stream order."""
        self.kernel.counters.zero_()
        self._host_stats.reset()

    def reset(self) -> None:
        """Empty the slots and forget history and counters, in stream order."""
        with self._turn.taken():
            self.plan.clear(self.kernel.state)
            self.reset_stats()

    def _fits(self, topk_ids: torch.Tensor) -> bool:
        num_ids = topk_ids.numel()
        return num_ids <= MAX_IDS and min(num_ids, self.store.num_experts) <= self.capacity

    def _at_once(self, topk_ids: torch.Tensor) -> ExpertWeightResult:
        topk_ids = topk_ids.contiguous()
        remapped = torch.empty_like(topk_ids)
        self.kernel(topk_ids, remapped)
        return ExpertWeightResult(self.tensors, remapped)

    def _in_pieces(self, topk_ids: torch.Tensor) -> ExpertWeightResult:
        """Where every expert has a slot nothing is ever evicted, so pieces change nothing."""
        flat = topk_ids.reshape(-1, 1)
        remapped = torch.empty_like(flat)
        for piece, out in zip(flat.split(MAX_IDS), remapped.split(MAX_IDS), strict=True):
            self.kernel(piece.contiguous(), out)
        return ExpertWeightResult(self.tensors, remapped.view(topk_ids.shape))

    def _with_the_host(self, topk_ids: torch.Tensor) -> Waves:
        """Fill free slots with the last tokens' experts, then residents and the rest in waves."""
        ids, demand, _ = self._read(topk_ids)
        before = self.slot_of
        last = topk_ids.reshape(-1, 1)[-MAX_IDS:].contiguous()
        counters = self.kernel.counters.clone()
        self.kernel(last, torch.empty_like(last), evict=False)
        self.kernel.counters.copy_(counters)  # counted here, with the whole demand
        after = self.slot_of
        resident = {e: after[e] for e in demand if after[e] != NOWHERE}
        bypassed = [e for e in demand if after[e] == NOWHERE]
        self._count(demand, [e for e in demand if before[e] == NOWHERE], bypassed)
        if bypassed:
            yield from self._stream(
                self.tensors, topk_ids, ids, resident, {}, lambda: None, bypassed
            )
        else:
            yield self._wave(self.tensors, topk_ids, ids, resident)

    def _count(self, demand: list[int], missed: list[int], bypassed: list[int]) -> None:
        self._host_stats.calls += 1
        self._host_stats.hits += len(demand) - len(missed)
        self._host_stats.misses += len(missed)
        self._host_stats.bypasses += len(bypassed)
        self._host_stats.bytes_moved += len(missed) * self.store.layout.nbytes

    def _count_wave(self) -> None:
        self._host_stats.waves += 1


def check_device_mode(layout: ExpertLayout, policy: str, device: torch.device) -> None:
    """Refuse what no kernel can do, before anything is loaded.

    Raises:
        ConfigError: a policy without a kernel, no Triton, no GPU, or tensors whose size is no
            multiple of four bytes.
    """
    remedy = "or let the host manage the cache (cache_mode='host')"
    if policy not in DEVICE_POLICIES:
        known = ", ".join(DEVICE_POLICIES)
        raise ConfigError(f"policy {policy!r} has no kernel: choose one of {known}, {remedy}")
    odd = [spec.name for spec in layout.specs if spec.nbytes % WORD_BYTES]
    if odd:
        raise ConfigError(
            f"tensors {odd} of an expert are no multiple of {WORD_BYTES} bytes, which the kernel "
            f"copies: use another model, {remedy}"
        )
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"cache_mode 'device' needs Triton: install it, {remedy}")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"cache_mode 'device' needs a CUDA device, not {device}: take one, {remedy}"
        )


def _typed(layout: ExpertLayout, gather: GatherLayout, buffer: torch.Tensor, rows: int) -> Any:
    tensors = []
    for spec, begin, words in zip(layout.specs, gather.slot_offsets, gather.num_words, strict=True):
        flat = buffer[begin : begin + rows * words]
        tensors.append(flat.view(spec.dtype).view(rows, *spec.shape))
    return layout.group(*tensors)
