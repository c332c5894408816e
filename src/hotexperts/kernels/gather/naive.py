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


def places_ahead(slot_of: torch.Tensor, capacity: int, *, whole: bool) -> torch.Tensor:
    """Where a prefill of all experts will find the absent ones, if all slots are taken.

    Args:
        slot_of: int32 `[E]`, slot of each expert, -1 for none.
        capacity: slots.
        whole: the layer before asked for all experts; if it did not, nothing is expected here.

    Returns:
        int32 `[E]`, places as in the plan's `passed`.
    """
    places = torch.full_like(slot_of, -1)
    absent = (slot_of < 0).nonzero().flatten()
    if whole and len(absent) == len(slot_of) - capacity:
        places[absent] = torch.arange(len(absent), dtype=torch.int32)
    return places


def fill_bank(
    layout: GatherLayout,
    rows: torch.Tensor,
    bank: torch.Tensor,
    ledger: torch.Tensor,
    places: torch.Tensor,
    topk_ids: torch.Tensor,
    first: int,
    first_key: int,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Copy one part of the bypassed experts.

    Args:
        layout: offsets in the bank.
        rows: int32 `[E, row_words]`, the store.
        bank: int32 `[buffer_words]`.
        ledger: int32 `[1 + num_rows]`: 0, then the key of the expert in each row.
        places: int32 `[E]`, place of an expert among the bypassed, -1 for others.
        topk_ids: ids of any shape; -1 is ignored.
        first: the part's first place.
        first_key: key of this layer's expert 0.

    Returns:
        Rows of the bank for ids, -1 where this part does not serve the pair; the same by expert;
        and the number of rows that were copied, which those are not that the ledger finds in
        place.
    """
    row_of = places - first
    row_of[(row_of < 0) | (row_of >= len(ledger) - 1)] = -1
    experts = (row_of >= 0).nonzero().flatten()
    held = ledger[1:]
    experts_copied = experts[held[row_of[experts].long()] != first_key + experts]
    gather(layout, rows, bank, experts_copied, row_of[experts_copied])
    held[row_of[experts].long()] = (first_key + experts).int()
    ids = topk_ids.long()
    local = torch.where(ids >= 0, row_of[ids.clamp(min=0)].long(), -1)
    return local.to(topk_ids.dtype), row_of, len(experts_copied)
