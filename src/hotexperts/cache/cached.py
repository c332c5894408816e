"""The cache of one layer, host-managed: Python decides, torch moves the bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hotexperts.banks import NUM_BANKS
from hotexperts.cache.packed_store import PackedBackingStore
from hotexperts.cache.provider import SLOTS, ExpertWeightResult, Waves
from hotexperts.cache.slots import GPUSlotManager
from hotexperts.cache.store import ExpertStore, TieredStore, expect
from hotexperts.cache.streaming import StreamingProvider, through_banks
from hotexperts.cache.transfer import StreamBanks
from hotexperts.cache.turn import Turn
from hotexperts.errors import ConfigError, ExpertCacheOverflow
from hotexperts.policy import DEFAULT_POLICY, POLICIES
from hotexperts.policy.shadow import ShadowCounter
from hotexperts.residency import NOWHERE
from hotexperts.stats import CacheStats
from hotexperts.types import Decision, Placement

Ids: TypeAlias = npt.NDArray[np.integer[Any]]


class CachedWeightProvider(StreamingProvider):
    """Slots, store and policy of one layer; Python decides (mode "host").

    One call brings the ids to the host, asks the policy once, enqueues the copies and remaps.
    A provider, and all that share its turn, serve one thread at a time.

    Args:
        store: where all experts live.
        capacity: cached slots, 1 to E.
        policy: a registered name or "module:Class".
        device: where the slots live; a CPU stands in for a GPU.
        num_staging: rows for experts that a policy bypasses.
        turn: whose turn it is, shared by the model's layers; None makes one of its own.
        banks: what calls over capacity stream through, shared by the model's layers; None makes
            a pair of this layer's own.

    Raises:
        ConfigError: a capacity outside 1 to E.
        UnknownNameError: an unknown policy.
    """

    def __init__(
        self,
        store: ExpertStore,
        capacity: int,
        *,
        policy: str = DEFAULT_POLICY,
        device: torch.device | str = "cpu",
        num_staging: int = 0,
        banks: StreamBanks | None = None,
        turn: Turn | None = None,
    ) -> None:
        device = torch.device(device)
        super().__init__(store, capacity, device, banks, turn)
        self.slots = GPUSlotManager(store.layout, store.num_experts, capacity, device, num_staging)
        self.policy = POLICIES.load(policy)(store.num_experts, capacity)
        self._moved_nbytes = store.layout.nbytes
        if isinstance(store, PackedBackingStore):
            self._moved_nbytes = store.form.nbytes
        self._stats = CacheStats()
        self._shadows = ShadowCounter(self.policy)

    def prepare(self, topk_ids: torch.Tensor) -> ExpertWeightResult:
        """Make every demanded expert resident and remap.

        Raises:
            ExpertCacheOverflow: more distinct experts than slots; nothing has changed then.
            ConcurrentUseError: another thread is inside.
            ConfigError: an id of E or above, or ids that are neither int32 nor int64.
        """
        with self._turn.taken():
            ids, demand, counts = self._read(topk_ids)
            if len(demand) > self.slots.capacity:
                raise ExpertCacheOverflow(len(demand), self.slots.capacity)
            decision = self._decide(demand, counts, max_bypassed=self.slots.num_staging)
            return self._at_once(topk_ids, ids, decision)

    def waves(self, topk_ids: torch.Tensor, *, prefill: bool = False) -> Waves:
        """Residents first, then the admitted, then the others through the banks.

        Raises:
            ConcurrentUseError: another thread is inside.
            ConfigError: an id of E or above, or ids that are neither int32 nor int64.
        """
        with self._turn.taken():
            ids, demand, counts = self._read(topk_ids)
            hits = [e for e in demand if e in self.slots.residency.residents]
            limit = self.slots.num_staging + self._free_bypasses(topk_ids)
            decision = self._decide(demand, counts, evict=not prefill, max_bypassed=limit)
            if len(decision.bypassed) <= self.slots.num_staging:
                yield self._at_once(topk_ids, ids, decision)
            else:
                yield from self._in_waves(topk_ids, ids, hits, decision)

    @property
    def stats(self) -> CacheStats:
        """The counters, a snapshot."""
        found = replace(self._stats)
        shadows = self._shadows.read()
        if shadows is not None:
            found = replace(found, lru_hits=shadows.lru, best_shadow_hits=max(shadows.shadows))
        if isinstance(self.store, TieredStore):
            found = replace(found, **asdict(self.store.counts))
        return found

    @property
    def slot_tensors(self) -> Any:
        """Named tuple of `[capacity + num_staging, *shape]`, the slots."""
        return self.slots.tensors

    @property
    def slot_buffer(self) -> torch.Tensor:
        """The memory that the slots are in, uint8."""
        return self.slots.buffer

    def reset_stats(self) -> None:
        """Set the counters to zero; the slots keep their experts."""
        self._stats.reset()
        self._shadows.reset()
        if isinstance(self.store, TieredStore):
            self.store.reset_counts()

    def reset(self) -> None:
        """Empty the slots and forget history and counters, as after construction."""
        with self._turn.taken():
            self.slots.residency.reset()
            self.policy.reset()
            if isinstance(self.store, TieredStore):
                self.store.reset()
            self.reset_stats()

    def state(self) -> dict[str, Any]:
        """See `StreamingProvider.state`."""
        slot_of = [s if s < self.slots.capacity else NOWHERE for s in self.slots.slot_of]
        return {"slot_of": slot_of, "policy": self.policy.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """See `StreamingProvider.restore`."""
        with self._turn.taken():
            self.slots.residency.restore(state["slot_of"])
            counted = self._shadows.read()
            try:
                self.policy.restore(state["policy"])
                self._shadows.go_on_from(counted)
                self._copy_in(state["slot_of"])
            except BaseException:
                self.slots.residency.reset()
                raise

    def _decide(
        self,
        demand: list[int],
        counts: list[int],
        *,
        evict: bool = True,
        max_bypassed: int,
    ) -> Decision:
        residency = self.slots.residency
        residency.unstage()
        decision = self.policy.decide(
            demand,
            counts,
            residency.residents,
            residency.num_free,
            evict=evict,
            max_bypassed=max_bypassed,
        )
        self._count(demand, decision)
        return decision

    def _at_once(self, topk_ids: torch.Tensor, ids: Ids, decision: Decision) -> ExpertWeightResult:
        residency = self.slots.residency
        with self._arriving(decision.admitted + decision.bypassed) as arrived:
            self._load(residency.apply(decision) + residency.stage(decision.bypassed), arrived)
        self._stats.waves += 1
        rows = np.append(np.asarray(residency.slot_of), NOWHERE)  # id -1 reads the last entry
        return remapped_result(self.slots.tensors, topk_ids, rows[ids])

    def _in_waves(
        self, topk_ids: torch.Tensor, ids: Ids, hits: list[int], decision: Decision
    ) -> Waves:
        """Hits first, then what was admitted, then the bypassed experts through the banks."""
        banks, residency = self._banks, self.slots.residency
        assert banks is not None, "experts that pass by mean capacity < E, which has banks"
        row_of_hit = {expert: residency.slot_of[expert] for expert in hits}
        for bank in range(NUM_BANKS):  # kernels may have filled them, of which nobody told
            banks.ledger.forget(bank)
        parts = banks.ledger.parts(self.layer, decision.bypassed)
        with self._arriving(decision.admitted) as arrived, banks.lane.ordered():
            placements = residency.apply(decision)
            with banks.lane.copying(0):
                self._load(placements, arrived)
            ready = banks.lane.mark()
            yield from through_banks(
                banks,
                self._slot_waves(topk_ids, ids, row_of_hit, dict(placements), ready),
                len(parts),
                lambda part, bank: banks.fill(bank, self.layer, self.store, parts[part].missing),
                lambda part, bank: self._wave(
                    banks.tensors[bank], topk_ids, ids, parts[part].row_of, part
                ),
            )

    def _slot_waves(
        self,
        topk_ids: torch.Tensor,
        ids: Ids,
        row_of_hit: dict[int, int],
        row_of_admitted: dict[int, int],
        ready: torch.cuda.Event | None,
    ) -> Waves:
        if row_of_hit:
            yield self._wave(self.slots.tensors, topk_ids, ids, row_of_hit)
        if row_of_admitted:
            assert self._banks is not None
            self._banks.lane.compute_after(ready)
            yield self._wave(self.slots.tensors, topk_ids, ids, row_of_admitted)

    def _wave(
        self,
        tensors: Any,
        topk_ids: torch.Tensor,
        ids: Ids,
        row_of: Mapping[int, int],
        part: int = SLOTS,
    ) -> ExpertWeightResult:
        self._stats.waves += 1
        rows = np.full(self.store.num_experts + 1, NOWHERE)
        rows[list(row_of)] = list(row_of.values())
        return remapped_result(tensors, topk_ids, rows[ids], part)

    def _read(self, topk_ids: torch.Tensor) -> tuple[Ids, list[int], list[int]]:
        """The ids on the host, the distinct ones ascending, and how often each occurs."""
        if topk_ids.dtype not in (torch.int32, torch.int64):
            raise ConfigError(f"expert ids are {topk_ids.dtype}: give int32 or int64")
        ids = topk_ids.cpu().numpy()
        ids = np.where(ids < 0, NOWHERE, ids)  # any negative id is nobody's
        demand, counts = np.unique(ids, return_counts=True)
        valid = demand >= 0
        if demand.size and int(demand[-1]) >= self.store.num_experts:
            raise ConfigError(
                f"expert id {demand[-1]} in a layer of {self.store.num_experts} experts: give "
                f"0 to {self.store.num_experts - 1}"
            )
        return ids, demand[valid].tolist(), counts[valid].tolist()

    def _load(self, placements: Sequence[Placement], arrived: set[int]) -> None:
        """Copy rows into slots, noting each expert whose row is under way."""
        expect(self.store, [expert for expert, _ in placements])
        for expert, slot in placements:
            self.store.copy_into(expert, [tensor[slot] for tensor in self.slots.tensors])
            arrived.add(expert)

    @contextmanager
    def _arriving(self, experts: Sequence[int]) -> Iterator[set[int]]:
        """Whatever breaks off inside, a slot whose row did not arrive is never read.

        That includes an interrupt in the middle of the ledger's own bookkeeping: a ledger that
        does not add up is emptied, which costs misses but no wrong answer.
        """
        arrived: set[int] = set()
        try:
            yield arrived
        except BaseException:
            self.slots.residency.recover(set(experts) - arrived)
            raise

    def _count(self, demand: Sequence[int], decision: Decision) -> None:
        num_misses = len(decision.admitted) + len(decision.bypassed)
        self._stats.calls += 1
        self._stats.hits += len(demand) - num_misses
        self._stats.misses += num_misses
        self._stats.bypasses += len(decision.bypassed)
        self._stats.evictions += len(decision.victims)
        self._stats.bytes_moved += num_misses * self._moved_nbytes


def remapped_result(
    tensors: Any, topk_ids: torch.Tensor, local: Ids, part: int = SLOTS
) -> ExpertWeightResult:
    """A result with `local` for ids, -1 where a pair is not served."""
    # The ids are tiny: the driver has its own copy of them when the call returns, so they
    # need not be page-locked, and the host need not wait for the copies of experts before.
    to_device = partial(torch.Tensor.to, device=topk_ids.device, non_blocking=True)
    remapped = to_device(torch.from_numpy(local), dtype=topk_ids.dtype)
    if not local.size or local.min() != NOWHERE:
        return ExpertWeightResult(tensors, remapped)
    pairs = to_device(torch.from_numpy(np.flatnonzero(local != NOWHERE)))
    return ExpertWeightResult(tensors, remapped, part=part, pairs=pairs)
