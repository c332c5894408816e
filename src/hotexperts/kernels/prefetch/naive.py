"""The prefetch, one row at a time, where nobody stops it."""

from __future__ import annotations

import torch

from hotexperts.kernels.gather.ahead import NOBODY, AheadRows, Turn, Word
from hotexperts.kernels.gather.layout import GatherLayout
from hotexperts.kernels.gather.naive import gather


def prefetch(
    ahead: AheadRows,
    source: GatherLayout,
    rows: torch.Tensor,
    scores: torch.Tensor,
    slot_of: torch.Tensor,
    layer: int,
    num_guesses: int,
    num_valid_tokens: int | None = None,
) -> int:
    """Copy the likeliest experts that have no slot into the rows ahead.

    Args:
        ahead: rows, and words, of which turns and experts are written.
        source: how a row lies in the store, and in the rows ahead.
        rows: int32 `[E, row_words]`, the store.
        scores: `[T, E]`, the higher the likelier; an expert's highest counts, of equals the lower
            id comes first. -inf and NaN are no guesses.
        slot_of: int32 `[E]`, slot of each expert, -1 for none.
        layer: whose experts they are.
        num_guesses: that are looked at, those with a slot among them.
        num_valid_tokens: tokens from there on are padding; None: none is.

    Returns:
        How many rows were filled.
    """
    known = scores[:num_valid_tokens].float().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    best = torch.cat([known, torch.full_like(scores[:1], -torch.inf).float()]).amax(0)
    likeliest = best.argsort(descending=True, stable=True)[:num_guesses].tolist()
    wanted = [e for e in likeliest if best[e] > -torch.inf and slot_of[e] < 0]
    experts = torch.tensor(wanted[: ahead.num_rows], dtype=torch.int64)
    gather(source, rows, ahead.buffer, experts, torch.arange(len(experts)))
    ahead.words[:, Word.TURN] = 4 * layer + Turn.DONE
    ahead.words[:, Word.EXPERTS :] = NOBODY
    ahead.words[:, Word.EXPERTS : Word.EXPERTS + len(experts)] = experts.int()
    return len(experts)
