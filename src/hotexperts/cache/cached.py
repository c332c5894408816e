"""The cache of one layer, host-managed: Python decides, torch moves the bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from hotexperts.cache.provider import ExpertWeightResult, Waves
from hotexperts.cache.slots import GPUSlotManager
from hotexperts.cache.store import ExpertStore
from hotexperts.cache.streaming import Ids, StreamingProvider, remapped_result
from hotexperts.cache.transfer import StreamBanks
from hotexperts.cache.turn import Turn
from hotexperts.errors import ExpertCacheOverflow
from hotexperts.policy import DEFAULT_POLICY, POLICIES
from hotexperts.residency import NOWHERE
from hotexperts.stats import CacheStats
from hotexperts.types import Decision, Placement


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
        self._stats = CacheStats()

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
            # What passes by of the policy's own will costs at most one wave more.
            limit = self.slots.num_staging + (self._banks.num_rows if self._banks else 0)
            decision = self._decide(demand, counts, evict=not prefill, max_bypassed=limit)
            if len(decision.bypassed) <= self.slots.num_staging:
                yield self._at_once(topk_ids, ids, decision)
            else:
                yield from self._in_waves(topk_ids, ids, hits, decision)

    @property
    def stats(self) -> CacheStats:
        """The counters, a snapshot."""
        return replace(self._stats)

    @property
    def slot_nbytes(self) -> int:
        """Device bytes of the slots."""
        return self.slots.nbytes

    def reset_stats(self) -> None:
        """Set the counters to zero; the slots keep their experts."""
        self._stats.reset()

    def reset(self) -> None:
        """Empty the slots and forget history and counters, as after construction."""
        with self._turn.taken():
            self.slots.residency.reset()
            self.policy.reset()
            self._stats.reset()

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
        residency = self.slots.residency
        row_of_hit = {expert: residency.slot_of[expert] for expert in hits}
        with self._arriving(decision.admitted) as arrived:
            placements = residency.apply(decision)
            yield from self._stream(
                self.slots.tensors,
                topk_ids,
                ids,
                row_of_hit,
                dict(placements),
                lambda: self._load(placements, arrived),
                decision.bypassed,
            )

    def _count_wave(self) -> None:
        self._stats.waves += 1

    def _load(self, placements: Sequence[Placement], arrived: set[int]) -> None:
        """Copy rows into slots, noting each expert whose row is under way."""
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
        self._stats.bytes_moved += num_misses * self.store.layout.nbytes
