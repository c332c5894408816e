"""Waves through banks that kernels fill: what passes by, the device alone knows."""

from __future__ import annotations

import torch

from hotexperts.cache.device_slots import DeviceSlots
from hotexperts.cache.provider import ExpertWeightResult, Waves
from hotexperts.cache.streaming import through_banks
from hotexperts.cache.transfer import StreamBanks
from hotexperts.kernels.gather.launch import BankFill


class BankWaves:
    """One layer's, ready to launch.

    Args:
        slots: the layer's, whose plan says who passes by.
        banks: shared by the model's layers of the same layout.
    """

    def __init__(self, slots: DeviceSlots, banks: StreamBanks) -> None:
        self._slots, self._banks = slots, banks
        self._fill = BankFill(
            slots.kernel,
            slots.gather(banks.num_rows),
            banks.num_rows,
            slots.rows,
            num_programs=slots.num_programs,
        )
        if slots.buffer.is_cuda:  # eager prefills may never launch it
            self._fill.warm_up(banks.buffers[0].view(torch.int32))
        banks.lane.outlives(self._fill.used_ahead)

    def waves(self, topk_ids: torch.Tensor, first: ExpertWeightResult, num_parts: int) -> Waves:
        """The wave over the slots while the banks fill, and so many parts of what passes by.

        Args:
            topk_ids: what the layer is asked for.
            first: what the slots serve, its plan enqueued.
            num_parts: as many as ids of this shape may need.
        """
        banks = self._banks
        topk_ids = topk_ids.contiguous()
        local = topk_ids.new_empty(num_parts, *topk_ids.shape)
        row_of = self._slots.slot_of.new_empty(num_parts, self._slots.store.num_experts)

        def fill(part: int, bank: int) -> None:
            buffer = banks.buffers[bank].view(torch.int32)
            num_fills = banks.num_fills[bank : bank + 1]
            self._fill(part, topk_ids, local[part], row_of[part], buffer, num_fills)

        def result(part: int, bank: int) -> ExpertWeightResult:
            return ExpertWeightResult(banks.tensors[bank], local[part], row_of[part], part)

        with banks.lane.ordered():
            yield from through_banks(banks, iter([first]), num_parts, fill, result)

    def fill_rows(self, row_of: torch.Tensor, bank: int) -> None:
        """Copy experts that the host chose into a bank, on the current stream.

        Args:
            row_of: int32 `[E]`, where to, -1 for experts that are not copied.
            bank: its number.
        """
        self._fill.rows(row_of, self._banks.buffers[bank].view(torch.int32))
