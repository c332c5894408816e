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


def fill_bank(
    layout: GatherLayout,
    rows: torch.Tensor,
    bank: torch.Tensor,
    passed: torch.Tensor,
    topk_ids: torch.Tensor,
    part: int,
    num_rows: int,
) -> torch.Tensor:
    """Copy one part of the bypassed experts.

    Args:
        layout: offsets in a bank of `num_rows` rows.
        rows: int32 `[E, row_words]`, the store.
        bank: int32 `[buffer_words]`.
        passed: int32 `[E]`, place of an expert among the bypassed, -1 for others.
        topk_ids: ids of any shape; -1 is ignored.
        part: which `num_rows` places.
        num_rows: rows of the bank.

    Returns:
        Rows of the bank for ids, -1 where this part does not serve the pair.
    """
    row_of = passed - part * num_rows
    row_of[(row_of < 0) | (row_of >= num_rows)] = -1
    experts = (row_of >= 0).nonzero().flatten()
    gather(layout, rows, bank, experts, row_of[experts])
    ids = topk_ids.long()
    return torch.where(ids >= 0, row_of[ids.clamp(min=0)].to(ids.dtype), -1).to(topk_ids.dtype)
