"""What both ways of managing a cache share: waves over the slots, then through two banks."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hotexperts.banks import NUM_BANKS
from hotexperts.cache.provider import ExpertWeightProvider, ExpertWeightResult, Waves
from hotexperts.cache.store import ExpertStore, expect
from hotexperts.cache.transfer import StreamBanks
from hotexperts.cache.turn import Turn
from hotexperts.errors import ConfigError
from hotexperts.residency import NOWHERE
from hotexperts.sizing import MIN_DEMAND_TO_BYPASS, bank_rows
from hotexperts.stats import CacheStats

_layers = itertools.count()


class StreamingProvider(ExpertWeightProvider):
    """A provider whose large calls stream experts through two banks.

    Args:
        store: where all experts live.
        capacity: cached slots.
        device: where slots and banks live.
        banks: shared by the model's layers; None makes a pair of this layer's own.
        turn: whose turn it is, shared likewise; None makes one.

    Attributes:
        layer: a number that no other provider has, for the ledger of the banks.

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
        self.layer = next(_layers)
        self._banks = banks
        self._turn = turn or Turn(device)
        if banks is not None:
            if banks.turn not in (None, self._turn):
                raise ConfigError("the banks belong to another turn: share both among the layers")
            banks.turn = self._turn

    @property
    @abstractmethod
    def stats(self) -> CacheStats:
        """The counters, a snapshot."""

    @property
    def lift_nbytes(self) -> int:
        """Device bytes of the table that guesses for the next layer; 0 without."""
        return 0

    @property
    @abstractmethod
    def slot_tensors(self) -> Any:
        """Named tuple of `[capacity, *shape]`, the slots."""

    @property
    @abstractmethod
    def slot_buffer(self) -> torch.Tensor:
        """The memory that the slots are in."""

    @property
    def slot_nbytes(self) -> int:
        """Device bytes of the slots."""
        return self.slot_buffer.nbytes

    @abstractmethod
    def reset_stats(self) -> None:
        """Set the counters to zero; the slots keep their experts."""

    @abstractmethod
    def reset(self) -> None:
        """Empty the slots and forget history and counters, as after construction."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Who is in which slot and what the policy knows, as JSON has it; waits for the device."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` gave: its experts are copied into their slots again.

        Raises:
            CheckpointError: it is no such state, or not of so many experts and slots.
        """

    def _copy_in(self, slot_of: Sequence[int]) -> None:
        """Bring the experts whose slots these are, in stream order."""
        expect(self.store, [e for e, slot in enumerate(slot_of) if slot != NOWHERE])
        for expert, slot in enumerate(slot_of):
            if slot != NOWHERE:
                self.store.copy_into(expert, [tensor[slot] for tensor in self.slot_tensors])

    def _most_demanded(self, topk_ids: torch.Tensor) -> int:
        """Distinct experts that ids of this shape may ask for."""
        return min(topk_ids.numel(), self.store.num_experts)

    def _free_bypasses(self, topk_ids: torch.Tensor) -> int:
        """How many may pass by of the policy's own will: one wave of them, where it may pay."""
        if self._banks is None or self._most_demanded(topk_ids) < MIN_DEMAND_TO_BYPASS:
            return 0
        return self._banks.num_rows


def through_banks(
    banks: StreamBanks,
    slot_waves: Iterator[ExpertWeightResult],
    num_parts: int,
    fill: Callable[[int, int], None],
    result: Callable[[int, int], ExpertWeightResult],
    *,
    slots_at: int = 0,
    fill_ahead: Callable[[int], None] | None = None,
) -> Waves:
    """Waves over the slots, by default while the first banks fill, and one wave a part.

    A bank is filled again only after the compute that reads it; the caller is inside
    `lane.ordered()`.

    Args:
        banks: what passes by does so through these.
        slot_waves: made beforehand, lazily.
        num_parts: parts of what passes by.
        fill: enqueues the copies of a part into a bank, on the lane.
        result: what to compute with for a part in a bank.
        slots_at: the waves over the slots come before this part.
        fill_ahead: enqueues copies for the next call into a bank that this one has done with.
    """
    lane = banks.lane

    def fill_part(part: int) -> torch.cuda.Event | None:
        with lane.copying(part % NUM_BANKS):
            fill(part, part % NUM_BANKS)
        return lane.mark()

    filled: list[Any] = [fill_part(part) for part in range(min(NUM_BANKS, num_parts))]
    for part in range(num_parts):
        if part == slots_at:
            yield from slot_waves
        lane.compute_after(filled[part])
        yield result(part, part % NUM_BANKS)
        if part + NUM_BANKS < num_parts:
            filled.append(fill_part(part + NUM_BANKS))
        elif fill_ahead is not None:
            with lane.copying_ahead(part % NUM_BANKS):
                fill_ahead(part % NUM_BANKS)
    if slots_at >= num_parts:
        yield from slot_waves
