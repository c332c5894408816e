"""What both ways of managing a cache share: ids read on the host, waves through the banks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hotexperts.cache.provider import ExpertWeightProvider, ExpertWeightResult, Waves
from hotexperts.cache.store import ExpertStore
from hotexperts.cache.transfer import NUM_BANKS, StreamBanks
from hotexperts.cache.turn import Turn
from hotexperts.errors import ConfigError
from hotexperts.residency import NOWHERE
from hotexperts.sizing import bank_rows
from hotexperts.stats import CacheStats

Ids: TypeAlias = npt.NDArray[np.integer[Any]]


class StreamingProvider(ExpertWeightProvider):
    """A provider whose large calls stream experts through two banks.

    Args:
        store: where all experts live.
        capacity: cached slots.
        device: where slots and banks live.
        banks: shared by the model's layers; None makes a pair of this layer's own.
        turn: whose turn it is, shared likewise; None makes one.

    Raises:
        ConfigError: banks of another layout.
    """

    def __init__(
        self,
        store: ExpertStore,
        capacity: int,
        device: torch.device,
        banks: StreamBanks | None,
        turn: Turn | None,
    ) -> None:
        num_bank_rows = bank_rows(store.num_experts, capacity)
        if banks is None and num_bank_rows > 0:
            banks = StreamBanks(store.layout, num_bank_rows, device)
        if banks is not None and banks.layout != store.layout:
            raise ConfigError("the banks have another layout than the store: share by layout")
        if turn is None and banks is not None and banks.turn is not None:
            turn = banks.turn
        self.store = store
        self._banks = banks
        self._turn = turn or Turn(device)
        if banks is not None:
            if banks.turn not in (None, self._turn):
                raise ConfigError("the banks belong to another turn: share both among the layers")
            banks.turn = self._turn

    def _stream(
        self,
        slots: Any,
        topk_ids: torch.Tensor,
        ids: Ids,
        row_of_hit: Mapping[int, int],
        row_of_admitted: Mapping[int, int],
        load_admitted: Callable[[], None],
        bypassed: Sequence[int],
    ) -> Waves:
        """Hits first, then what is admitted, then the bypassed experts through the banks.

        Args:
            slots: the slot tensors.
            topk_ids: the ids as given.
            ids: the same on the host.
            row_of_hit: slot of each expert that is there already.
            row_of_admitted: slot of each that `load_admitted` copies.
            load_admitted: enqueues those copies.
            bypassed: experts for the banks.
        """
        banks = self._banks
        assert banks is not None, "experts that pass by mean capacity < E, which has banks"
        with banks.lane.ordered():
            with banks.lane.copying():
                load_admitted()
            ready = banks.lane.mark()
            parts = [
                bypassed[i : i + banks.num_rows] for i in range(0, len(bypassed), banks.num_rows)
            ]
            filled = [banks.fill(i, self.store, part) for i, part in enumerate(parts[:NUM_BANKS])]
            if row_of_hit:
                yield self._wave(slots, topk_ids, ids, row_of_hit)
            banks.lane.compute_after(ready)
            if row_of_admitted:
                yield self._wave(slots, topk_ids, ids, row_of_admitted)
            for i, part in enumerate(parts):
                bank = i % NUM_BANKS
                banks.lane.compute_after(filled[i])
                row_of = {expert: row for row, expert in enumerate(part)}
                yield self._wave(banks.tensors[bank], topk_ids, ids, row_of)
                if i + NUM_BANKS < len(parts):
                    banks.lane.wait_for_compute()
                    filled.append(banks.fill(bank, self.store, parts[i + NUM_BANKS]))

    def _wave(
        self, tensors: Any, topk_ids: torch.Tensor, ids: Ids, row_of: Mapping[int, int]
    ) -> ExpertWeightResult:
        self._count_wave()
        rows = np.full(self.store.num_experts + 1, NOWHERE)
        rows[list(row_of)] = list(row_of.values())
        return remapped_result(tensors, topk_ids, rows[ids])

    @property
    @abstractmethod
    def stats(self) -> CacheStats:
        """The counters, a snapshot."""

    @property
    @abstractmethod
    def slot_nbytes(self) -> int:
        """Device bytes of the slots."""

    @abstractmethod
    def reset_stats(self) -> None:
        """Set the counters to zero; the slots keep their experts."""

    @abstractmethod
    def reset(self) -> None:
        """Empty the slots and forget history and counters, as after construction."""

    @abstractmethod
    def _count_wave(self) -> None: ...

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
                f"expert id {demand[-1]} in a layer of {self.store.num_experts} experts: ids go "
                f"from 0 to {self.store.num_experts - 1}"
            )
        return ids, demand[valid].tolist(), counts[valid].tolist()


def remapped_result(tensors: Any, topk_ids: torch.Tensor, local: Ids) -> ExpertWeightResult:
    """A result with `local` for ids, -1 where a pair is not served."""
    # The ids are tiny: the driver has its own copy of them when the call returns, so they
    # need not be page-locked, and the host need not wait for the copies of experts before.
    to_device = partial(torch.Tensor.to, device=topk_ids.device, non_blocking=True)
    remapped = to_device(torch.from_numpy(local), dtype=topk_ids.dtype)
    pairs = None
    if local.size and local.min() == NOWHERE:
        pairs = to_device(torch.from_numpy(np.flatnonzero(local != NOWHERE)))
    return ExpertWeightResult(tensors, remapped, None, pairs)
