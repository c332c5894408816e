"""The gather, one copy at a time."""

from __future__ import annotations

import torch

from hotexperts.kernels.gather.layout import GatherLayout


def gather(
    layout: GatherLayout,
    rows: torch.Tensor,
    buffer: torch.Tensor,
    experts: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Copy whole rows.

    Args:
        layout: offsets.
        rows: int32 `[E, row_words]`, the store.
        buffer: int32 `[buffer_words]`, the slots.
        experts: which rows.
        slots: where to; same length.
    """
    for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
        for row_offset, slot_offset, num_words in zip(
            layout.row_offsets, layout.slot_offsets, layout.num_words, strict=True
        ):
            begin = slot_offset + slot * num_words
            source = rows[expert, row_offset : row_offset + num_words]
            buffer[begin : begin + num_words] = source
