"""The cache of one layer, host-managed: Python decides, torch moves the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hotexperts.cache.provider import ExpertWeightProvider, ExpertWeightResult, Waves
from hotexperts.cache.slots import GPUSlotManager
from hotexperts.cache.store import ExpertStore
from hotexperts.cache.transfer import NUM_BANKS, StreamBanks
from hotexperts.cache.turn import Turn
from hotexperts.errors import ConfigError, ExpertCacheOverflow
from hotexperts.policy import DEFAULT_POLICY, POLICIES
from hotexperts.residency import NOWHERE
from hotexperts.sizing import bank_rows
from hotexperts.stats import CacheStats
from hotexperts.types import Decision, Placement

Ids: TypeAlias = npt.NDArray[np.integer[Any]]


class CachedWeightProvider(ExpertWeightProvider):
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
        self.store = store
        self.slots = GPUSlotManager(store.layout, store.num_experts, capacity, device, num_staging)
        self.policy = POLICIES.load(policy)(store.num_experts, capacity)
        self.stats = CacheStats()
        num_bank_rows = bank_rows(store.num_experts, capacity)
        if banks is None and num_bank_rows:
            banks = StreamBanks(store.layout, num_bank_rows, device)
        if banks is not None and banks.layout != store.layout:
            raise ConfigError("the banks have another layout than the store: share by layout")
        self._banks = banks
        self._turn = turn or Turn(device)

    def prepare(self, topk_ids: torch.Tensor) -> ExpertWeightResult:
        """Make every demanded expert resident and remap.

        Raises:
            ExpertCacheOverflow: more distinct experts than slots; nothing has changed then.
            ConcurrentUseError: another thread is inside.
            ValueError: an id of E or above.
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
            ValueError: an id of E or above.
        """
        with self._turn.taken():
            ids, demand, counts = self._read(topk_ids)
            hits = [e for e in demand if e in self.slots.residency.residents]
            # What passes by of the policy's own will costs at most one wave more.
            limit = self.slots.num_staging + (self._banks.num_rows if self._banks else 0)
            decision = self._decide(demand, counts, evict=not prefill, max_bypassed=limit)
            if len(decision.bypassed) <= self.slots.num_staging:
                yield self._at_once(topk_ids, ids, decision)
            else:
                yield from self._in_waves(topk_ids, ids, hits, decision)

    def reset(self) -> None:
        """Empty the slots and forget history and counters, as after construction."""
        with self._turn.taken():
            self.slots.residency.reset()
            self.policy.reset()
            self.stats.reset()

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
        self._load(residency.apply(decision) + residency.stage(decision.bypassed))
        self.stats.waves += 1
        rows = np.append(np.asarray(residency.slot_of), NOWHERE)  # id -1 reads the last entry
        return self._result(self.slots.tensors, topk_ids, rows[ids])

    def _in_waves(
        self, topk_ids: torch.Tensor, ids: Ids, hits: list[int], decision: Decision
    ) -> Waves:
        residency, banks = self.slots.residency, self._banks
        assert banks is not None, "experts that pass by mean capacity < E, which has banks"
        slots = self.slots.tensors
        row_of_hit = {expert: residency.slot_of[expert] for expert in hits}
        placements = residency.apply(decision)
        with banks.lane.ordered():
            with banks.lane.copying():
                self._load(placements)
            ready = banks.lane.mark()
            parts = _split(decision.bypassed, banks.num_rows)
            filled = [banks.fill(i, self.store, part) for i, part in enumerate(parts[:NUM_BANKS])]
            if hits:
                yield self._wave(slots, topk_ids, ids, row_of_hit)
            banks.lane.compute_after(ready)
            if placements:
                yield self._wave(slots, topk_ids, ids, dict(placements))
            for i, part in enumerate(parts):
                bank = i % NUM_BANKS
                banks.lane.compute_after(filled[i])
                row_of = {expert: row for row, expert in enumerate(part)}
                yield self._wave(banks.tensors[bank], topk_ids, ids, row_of)
                if i + NUM_BANKS < len(parts):
                    banks.lane.wait_for_compute()
                    filled.append(banks.fill(bank, self.store, parts[i + NUM_BANKS]))

    def _wave(
        self, tensors: Any, topk_ids: torch.Tensor, ids: Ids, row_of: dict[int, int]
    ) -> ExpertWeightResult:
        self.stats.waves += 1
        rows = np.full(self.slots.num_experts + 1, NOWHERE)
        rows[list(row_of)] = list(row_of.values())
        return self._result(tensors, topk_ids, rows[ids])

    def _result(self, tensors: Any, topk_ids: torch.Tensor, local: Ids) -> ExpertWeightResult:
        # The ids are tiny: the driver has its own copy of them when the call returns, so they
        # need not be page-locked, and the host need not wait for the copies of experts before.
        to_device = partial(torch.Tensor.to, device=topk_ids.device, non_blocking=True)
        remapped = to_device(torch.from_numpy(local), dtype=topk_ids.dtype)
        pairs = None
        if local.size and local.min() == NOWHERE:
            pairs = to_device(torch.from_numpy(np.flatnonzero(local != NOWHERE)))
        return ExpertWeightResult(tensors, remapped, None, pairs)

    def _read(self, topk_ids: torch.Tensor) -> tuple[Ids, list[int], list[int]]:
        """The ids on the host, the distinct ones ascending, and how often each occurs."""
        ids = topk_ids.cpu().numpy()
        demand, counts = np.unique(ids, return_counts=True)
        valid = demand >= 0
        if demand.size and int(demand[-1]) >= self.slots.num_experts:
            raise ValueError(
                f"expert id {demand[-1]} in a layer of {self.slots.num_experts} experts"
            )
        return ids, demand[valid].tolist(), counts[valid].tolist()

    def _load(self, placements: Sequence[Placement]) -> None:
        """Copy rows into slots; a row that does not arrive leaves its slot empty."""
        for i, (expert, slot) in enumerate(placements):
            try:
                self.store.copy_into(expert, [tensor[slot] for tensor in self.slots.tensors])
            except BaseException:
                self.slots.residency.discard(p.expert for p in placements[i:])
                raise

    def _count(self, demand: Sequence[int], decision: Decision) -> None:
        num_misses = len(decision.admitted) + len(decision.bypassed)
        self.stats.calls += 1
        self.stats.hits += len(demand) - num_misses
        self.stats.misses += num_misses
        self.stats.bypasses += len(decision.bypassed)
        self.stats.evictions += len(decision.victims)
        self.stats.bytes_moved += num_misses * self.store.layout.nbytes


def _split(experts: Sequence[int], size: int) -> list[Sequence[int]]:
    return [experts[i : i + size] for i in range(0, len(experts), size)]
