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
    """Copy whole rows, unpacked.

    Args:
        layout: offsets.
        rows: int32 `[E, row_words]`, the store.
        buffer: int32 `[buffer_words]`, the slots.
        experts: which rows.
        slots: where to; same length.
    """
    for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
        for row_offset, slot_offset, num_words, packing in zip(
            layout.row_offsets, layout.slot_offsets, layout.num_words, layout.packings, strict=True
        ):
            begin = slot_offset + slot * num_words
            source = rows[expert, row_offset:]
            if packing is None:
                found = source[:num_words]
            else:
                packed = source[: packing.num_words(2 * num_words)].unsqueeze(0)
                found = packing.unpack(packed, 2 * num_words).contiguous().view(torch.int32)[0]
            buffer[begin : begin + num_words] = found


def fill_bank(
    layout: GatherLayout,
    rows: torch.Tensor,
    bank: torch.Tensor,
    num_rows: int,
    places: torch.Tensor,
    topk_ids: torch.Tensor,
    first: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy one part of the bypassed experts.

    Args:
        layout: offsets in the bank.
        rows: int32 `[E, row_words]`, the store.
        bank: int32 `[buffer_words]`.
        num_rows: of the bank.
        places: int32 `[E]`, place of an expert among the bypassed, -1 for others.
        topk_ids: ids of any shape; -1 is ignored.
        first: the part's first place.

    Returns:
        Rows of the bank for ids, -1 where this part does not serve the pair, and the same by
        expert.
    """
    row_of = places - first
    row_of[(row_of < 0) | (row_of >= num_rows)] = -1
    experts = (row_of >= 0).nonzero().flatten()
    gather(layout, rows, bank, experts, row_of[experts])
    ids = topk_ids.long()
    local = torch.where(ids >= 0, row_of[ids.clamp(min=0)].long(), -1)
    return local.to(topk_ids.dtype), row_of
