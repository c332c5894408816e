"""The prefetch, one row at a time, where nobody stops it."""

from __future__ import annotations

import torch

from hotexperts.kernels.gather.ahead import KEYS, AheadRows
from hotexperts.kernels.gather.layout import GatherLayout
from hotexperts.kernels.gather.naive import gather


def prefetch(
    ahead: AheadRows,
    source: GatherLayout,
    rows: torch.Tensor,
    guesses: torch.Tensor,
    slot_of: torch.Tensor,
    first_key: int,
) -> int:
    """Copy guessed experts that have no slot into the rows ahead, in the order of the guesses.

    Args:
        ahead: rows, and words of which the keys are written.
        source: how a row lies in the store, and in the rows ahead.
        rows: int32 `[E, row_words]`, the store.
        guesses: experts, the likeliest first; -1 for none.
        slot_of: int32 `[E]`, slot of each expert, -1 for none.
        first_key: of expert 0.

    Returns:
        How many rows were filled.
    """
    wanted = [e for e in guesses.tolist() if 0 <= e < len(slot_of) and slot_of[e] < 0]
    experts = torch.tensor(wanted[: ahead.num_rows], dtype=torch.int64)
    gather(source, rows, ahead.buffer, experts, torch.arange(len(experts)))
    keys = ahead.words[KEYS : KEYS + ahead.num_rows]
    keys.fill_(-1)
    keys[: len(experts)] = (first_key + experts).int()
    return len(experts)
