"""Providers: what an engine talks to. `CachedWeightProvider` is the cache itself, host-managed."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hotexperts.cache.slots import GPUSlotManager
from hotexperts.cache.store import ExpertStore
from hotexperts.cache.transfer import NUM_BANKS, StreamBanks
from hotexperts.errors import ConcurrentUseError, ConfigError, ExpertCacheOverflow
from hotexperts.policy import DEFAULT_POLICY, POLICIES
from hotexperts.residency import NOWHERE
from hotexperts.sizing import bank_rows
from hotexperts.stats import CacheStats
from hotexperts.types import Placement

Ids: TypeAlias = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class ExpertWeightResult:
    """Weights for one kernel call.

    Attributes:
        tensors: named tuple of `[rows, *shape]`; a row is one expert.
        topk_ids: the ids to pass to the kernel, shape and dtype as given: rows of `tensors`, -1
            where this call does not serve the pair.
        expert_map: int32 `[E]` from expert to row, for kernels that map by themselves; None
            where `topk_ids` is already remapped.
        pairs: int64, ascending positions in the flattened `topk_ids` that this call serves; None
            where it serves all.
    """

    tensors: Any
    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None = None
    pairs: torch.Tensor | None = None


Waves: TypeAlias = Generator[ExpertWeightResult, None, None]


class ExpertWeightProvider(ABC):
    """Gives one layer's kernel the weights that its routed tokens need."""

    @abstractmethod
    def prepare(self, topk_ids: torch.Tensor) -> ExpertWeightResult:
        """Weights for all of `topk_ids` in one kernel call.

        Args:
            topk_ids: expert ids of any shape, int32 or int64; -1 is ignored.

        Raises:
            ExpertCacheOverflow: more distinct experts than slots.
        """

    @abstractmethod
    def waves(self, topk_ids: torch.Tensor, *, prefill: bool = False) -> Waves:
        """The same in as many kernel calls as it takes; each pair is served exactly once.

        A wave's tensors are valid until the next wave is asked for. Close what you do not run to
        its end: the provider stays busy until then.

        Args:
            topk_ids: as for `prepare`.
            prefill: admit into free slots only, so that decode's working set stays.
        """


class FullGPUProvider(ExpertWeightProvider):
    """Every expert resident: ids and weights pass through untouched.

    Args:
        tensors: named tuple of `[E, *shape]`.
    """

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors

    def prepare(self, topk_ids: torch.Tensor) -> ExpertWeightResult:
        """The ids as given and all experts."""
        return ExpertWeightResult(self.tensors, topk_ids)

    def waves(self, topk_ids: torch.Tensor, *, prefill: bool = False) -> Waves:
        """One wave."""
        yield self.prepare(topk_ids)


class CachedWeightProvider(ExpertWeightProvider):
    """Slots, store and policy of one layer; Python decides (mode "host").

    One call brings the ids to the host, asks the policy once, enqueues the copies and remaps.
    A provider serves one thread at a time.

    Args:
        store: where all experts live.
        capacity: cached slots, 1 to E.
        policy: a registered name or "module:Class".
        device: where the slots live; a CPU stands in for a GPU.
        num_staging: rows for experts that a policy bypasses.
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
        self._busy = threading.Lock()

    def prepare(self, topk_ids: torch.Tensor) -> ExpertWeightResult:
        """Make every demanded expert resident and remap.

        Raises:
            ExpertCacheOverflow: more distinct experts than slots; nothing has changed then.
            ConcurrentUseError: another thread is inside.
            ValueError: an id of E or above.
        """
        with self._exclusive():
            ids, demand, counts = self._read(topk_ids)
            if len(demand) > self.slots.capacity:
                raise ExpertCacheOverflow(len(demand), self.slots.capacity)
            self.slots.residency.unstage()
            return self._single_wave(topk_ids, ids, demand, counts)

    def waves(self, topk_ids: torch.Tensor, *, prefill: bool = False) -> Waves:
        """Residents first, then the admitted, then the others through the banks.

        Raises:
            ConcurrentUseError: another thread is inside.
            ValueError: an id of E or above.
        """
        with self._exclusive():
            ids, demand, counts = self._read(topk_ids)
            self.slots.residency.unstage()
            num_misses = sum(self.slots.slot_of[expert] == NOWHERE for expert in demand)
            fits = len(demand) <= self.slots.capacity
            if fits and not (prefill and num_misses > self.slots.residency.num_free):
                yield self._single_wave(topk_ids, ids, demand, counts)
            else:
                yield from self._many_waves(topk_ids, ids, demand, counts, evict=not prefill)

    def reset(self) -> None:
        """Empty the slots and forget history and counters, as after construction."""
        with self._exclusive():
            self.slots.residency.reset()
            self.policy.reset()
            self.stats.reset()

    def _single_wave(
        self, topk_ids: torch.Tensor, ids: Ids, demand: list[int], counts: list[int]
    ) -> ExpertWeightResult:
        residency = self.slots.residency
        decision = self.policy.decide(
            demand,
            counts,
            residency.residents,
            residency.num_free,
            max_bypassed=self.slots.num_staging,
        )
        self._count(demand, decision.admitted, decision.bypassed, decision.victims)
        placements = residency.apply(decision) + residency.stage(decision.bypassed)
        self._load(placements)
        self.stats.waves += 1
        rows = np.append(np.asarray(residency.slot_of), NOWHERE)  # id -1 reads the last entry
        return self._result(self.slots.tensors, topk_ids, rows[ids])

    def _many_waves(
        self,
        topk_ids: torch.Tensor,
        ids: Ids,
        demand: list[int],
        counts: list[int],
        *,
        evict: bool,
    ) -> Waves:
        residency, banks = self.slots.residency, self._banks
        assert banks is not None, "a demand over capacity means capacity < E, which has banks"
        hits = [expert for expert in demand if residency.slot_of[expert] != NOWHERE]
        decision = self.policy.decide(
            demand, counts, residency.residents, residency.num_free, evict=evict
        )
        self._count(demand, decision.admitted, decision.bypassed, decision.victims)
        placements = residency.apply(decision)
        banks.lane.wait_for_compute()  # victims' slots may still be read by earlier calls
        with banks.lane.copying():
            self._load(placements)
        ready = banks.lane.mark()
        streamed = [
            decision.bypassed[i : i + banks.num_rows]
            for i in range(0, len(decision.bypassed), banks.num_rows)
        ]
        filled = [banks.fill(i, self.store, part) for i, part in enumerate(streamed[:NUM_BANKS])]
        slot_of = dict(enumerate(residency.slot_of))
        if hits:
            yield self._wave(self.slots.tensors, topk_ids, ids, {e: slot_of[e] for e in hits})
        banks.lane.compute_after(ready)
        if placements:
            yield self._wave(self.slots.tensors, topk_ids, ids, dict(placements))
        for i, part in enumerate(streamed):
            bank = i % NUM_BANKS
            banks.lane.compute_after(filled[i])
            row_of = {expert: row for row, expert in enumerate(part)}
            yield self._wave(banks.tensors[bank], topk_ids, ids, row_of)
            banks.mark_used(bank)
            if i + NUM_BANKS < len(streamed):
                filled.append(banks.fill(bank, self.store, streamed[i + NUM_BANKS]))

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

    def _count(
        self,
        demand: Sequence[int],
        admitted: Sequence[int],
        bypassed: Sequence[int],
        victims: Sequence[int],
    ) -> None:
        num_misses = len(admitted) + len(bypassed)
        self.stats.calls += 1
        self.stats.hits += len(demand) - num_misses
        self.stats.misses += num_misses
        self.stats.bypasses += len(bypassed)
        self.stats.evictions += len(victims)
        self.stats.bytes_moved += num_misses * self.store.layout.nbytes

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise ConcurrentUseError(
                "two threads are in the same expert cache: give each its own model, or take turns"
            )
        try:
            yield
        finally:
            self._busy.release()
