"""A prefill outside of CUDA graphs: the host waits for the plan once, then knows what to copy.

The copy engine moves a row faster than kernels do (0.99 of the link against 0.93), but takes its
addresses from the host. A prefill is long enough to wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING

import torch

from hotexperts.banks import NUM_BANKS, BankPart
from hotexperts.cache.provider import SLOTS, ExpertWeightResult, Waves
from hotexperts.cache.store import RowForm
from hotexperts.cache.streaming import through_banks
from hotexperts.types import Placement

if TYPE_CHECKING:
    from hotexperts.cache.device import DeviceWeightProvider

NOBODY = -1  # an id that is no expert's, a row that is not there
ENGINE_MIN_NBYTES = 1 << 20  # of a tensor of a row; below, the host is slower than the link
MOST = 0.9  # of the absent experts are asked for: so the next layer's will be


@dataclass(frozen=True, slots=True)
class Seen:
    """What the host read when it waited.

    Attributes:
        passed: experts that neither have nor get a slot, ascending.
        next_absent: the next layer's experts without a slot, ascending; none where it has free
            slots, or there is no next layer that shares the banks.
        num_pairs: of each expert; empty where nobody asks.
    """

    passed: list[int]
    next_absent: list[int]
    num_pairs: list[int]


def goes_by_engine(form: RowForm) -> bool:
    """Whether the copy engine brings such rows, or kernels do; each layer's may lie otherwise."""
    return form.row_nbytes >= ENGINE_MIN_NBYTES * len(form.sizes) and not form.is_packed


class GuidedPrefill:
    """The waves of one prefill of a layer.

    Args:
        provider: the layer's; its banks are there.
    """

    def __init__(self, provider: DeviceWeightProvider) -> None:
        assert provider.banks is not None, "whatever may pass by does so through banks"
        self._provider = provider
        self._banks = provider.banks

    def waves(self, topk_ids: torch.Tensor, first: ExpertWeightResult) -> Waves:
        """What came ahead, the slots while the banks fill, and the other parts.

        Args:
            topk_ids: contiguous.
            first: what the slots serve, its plan enqueued.
        """
        provider, banks = self._provider, self._banks
        seen = self._wait(topk_ids)
        if not seen.passed:
            yield first
            return
        parts = banks.ledger.parts(provider.layer, seen.passed)
        served = self._results(topk_ids, first, parts, seen)
        provider.counters.count_by_host(num_waves=len(parts))
        fill_ahead = partial(self._fill_ahead, seen=seen) if seen.next_absent else None
        with banks.lane.ordered():
            yield from through_banks(
                banks,
                iter(served[:1]),
                len(parts),
                lambda part, bank: self._fill(provider, bank, parts[part].missing),
                lambda part, bank: served[1 + part],
                slots_at=sum(1 for _ in takewhile(lambda part: not part.missing, parts)),
                fill_ahead=fill_ahead,
            )

    def _wait(self, topk_ids: torch.Tensor) -> Seen:
        provider, following = self._provider, self._following()
        num_experts = provider.store.num_experts
        fields = [provider.slots.passed, self._banks.num_fills]
        if following is not None:
            fields.append(following.slots.slot_of)
        if provider.tells_pairs:
            ids = topk_ids.flatten().clamp(NOBODY, num_experts).long() - NOBODY
            counts = torch.zeros(num_experts + 2, dtype=torch.int64, device=ids.device)
            fields.append(counts.scatter_add_(0, ids, torch.ones_like(ids)).int()[1:-1])
        words = iter(torch.cat(fields).tolist())
        places = list(islice(words, num_experts))
        self._banks.fills_were(list(islice(words, NUM_BANKS)))
        passed = [expert for expert, place in enumerate(places) if place >= 0]
        absent: list[int] = []
        if following is not None:
            slots = list(islice(words, following.store.num_experts))
            absent = [expert for expert, slot in enumerate(slots) if slot < 0]
            is_full = len(slots) - len(absent) == following.capacity
            is_most = len(passed) >= MOST * (num_experts - provider.capacity)
            absent = absent if is_full and is_most else []
        return Seen(passed, absent, list(words))

    def _following(self) -> DeviceWeightProvider | None:
        following = self._provider.next_provider
        return following if following is not None and following.banks is self._banks else None

    def _fill(
        self, provider: DeviceWeightProvider, bank: int, missing: Sequence[Placement]
    ) -> None:
        """Copy a layer's experts, on the current stream."""
        banks, layer = self._banks, provider.layer
        if goes_by_engine(provider.store.form):
            banks.fill(bank, layer, provider.store, missing)
            provider.counters.count_by_host(num_copies=len(missing))
        elif missing:
            row_of = torch.full((provider.store.num_experts,), NOBODY, dtype=torch.int32)
            for expert, row in missing:
                row_of[expert] = row
            assert provider.bank_waves is not None, "it shares the banks"
            with banks.ledger.copying(bank, layer, missing):
                on_device = row_of.to(provider.buffer.device, non_blocking=True)
                provider.bank_waves.fill_rows(on_device, bank)

    def _fill_ahead(self, bank: int, seen: Seen) -> None:
        """What the next layer asks for first if it, too, asks for nearly all."""
        following, banks = self._following(), self._banks
        assert following is not None, "it was there when the host waited"
        expected = seen.next_absent[bank * banks.num_rows :][: banks.num_rows]
        missing = banks.ledger.lacking(bank, following.layer, expected)
        self._fill(following, bank, missing)

    def _results(
        self,
        topk_ids: torch.Tensor,
        first: ExpertWeightResult,
        parts: Sequence[BankPart],
        seen: Seen,
    ) -> list[ExpertWeightResult]:
        """What to compute with: the slots, then each part."""
        num_experts = self._provider.store.num_experts
        rows = [[NOBODY] * (num_experts + 2) for _ in parts]
        for row, part in zip(rows, parts, strict=True):
            for expert, place in part.row_of.items():
                row[expert] = place
        row_of = torch.tensor(rows, dtype=torch.int32).to(topk_ids.device, non_blocking=True)
        # An id beyond both ends reads one of the last two entries.
        known = topk_ids.clamp(NOBODY, num_experts).long()
        tensors = self._banks.tensors
        served = [replace(first, part=SLOTS)]
        for number, of_part in enumerate(row_of):
            local = of_part[known].to(topk_ids.dtype)
            rows_of = tensors[number % NUM_BANKS]
            served.append(ExpertWeightResult(rows_of, local, of_part[:num_experts], number))
        if self._provider.tells_pairs:
            pairs = self._pairs(known.flatten(), parts, seen)
            served = [replace(one, pairs=its) for one, its in zip(served, pairs, strict=True)]
        return served

    def _pairs(
        self, known: torch.Tensor, parts: Sequence[BankPart], seen: Seen
    ) -> Iterator[torch.Tensor]:
        """Positions in the flattened ids: of the slots, then of each part; ascending."""
        num_experts = len(seen.num_pairs)
        part_of = [0] * num_experts + [NOBODY, NOBODY]
        sizes = [0] * (1 + len(parts))
        for number, part in enumerate(parts, start=1):
            for expert in part.row_of:
                part_of[expert] = number
        for expert, num_pairs in enumerate(seen.num_pairs):
            sizes[part_of[expert]] += num_pairs
        of_pair = torch.tensor(part_of, dtype=torch.int32).to(known.device, non_blocking=True)[
            known
        ]
        order = of_pair.argsort(stable=True)
        return iter(order.split([len(known) - sum(sizes), *sizes])[1:])
