"""How much of the next layer's demand was guessed."""

from __future__ import annotations

import numpy as np

from hotexperts.simulate.trace import NOT_RECORDED, Ints


def count_guessed(ids: Ints, guesses: Ints, num_guesses: int) -> tuple[int, int]:
    """Demanded experts that were among the first guesses, and how many there were to guess.

    Args:
        ids: `[token, layer, k]`, as in a trace.
        guesses: `[token, layer, guess]`, of the layer after, the likeliest first; -1 for none.
        num_guesses: how many of a token's guesses count in each layer.

    Returns:
        Those guessed and those demanded, over all tokens and all layers but the first.
    """
    demand = ids[:, 1:, :, None]
    is_guessed = (demand == guesses[:, :-1, None, :num_guesses]).any(axis=-1)
    is_demanded = demand[..., 0] != NOT_RECORDED
    return int(np.count_nonzero(is_guessed & is_demanded)), int(np.count_nonzero(is_demanded))
