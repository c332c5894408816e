"""Next layer's router: the target's gate on an earlier layer's hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hotexperts.predict.base import Floats, Hints, Ids, Predictor, to_log_odds

PRIOR = 2.0
SUREST = 0.9  # chance of the first rank before anything is learned


class Gate(Predictor):
    """A chance a rank and layer, learned from how often that rank was right.

    The engine multiplies the hidden state at the tap by the target router's weights; here the
    ranked ids come with the hints (mixtral-offloading, arXiv 2312.17238, guesses so). In a batch an
    expert's rank is the best one that a token gives it. `p = (right_r + 2 prior_r) / (n_r + 2)`, of
    n_r experts that had rank r right_r were demanded: the prior falls from .9 at the first rank to
    the base rate k / E at rank 2 k and beyond; experts without a rank share a chance.
    """

    name = "gate"
    needs: ClassVar[frozenset[str]] = frozenset({"gate"})

    def reset(self) -> None:
        """Forget every guess."""
        super().reset()
        falling = SUREST - (SUREST - self.base) * np.arange(self.num_experts + 1) / (2 * self.top_k)
        self.prior = np.maximum(falling, self.base).astype(np.float32)
        self.prior[-1] = self.base
        shape = self.num_layers, self.num_experts + 1
        self.num_right = np.zeros(shape, np.float32)
        self.num_ranked = np.zeros(shape, np.float32)

    def log_odds(self, layer: int, hints: Hints) -> Floats:
        """See the class; where no guess is recorded all are as likely."""
        if not has_guess(hints):
            return np.full(self.num_experts, to_log_odds(np.float32(self.base)), np.float32)
        chance = (self.num_right[layer] + PRIOR * self.prior) / (self.num_ranked[layer] + PRIOR)
        return to_log_odds(chance)[best_ranks(hints.gate, self.num_experts)]

    def learn(self, layer: int, demand: Ids, hints: Hints) -> None:
        """Count what each rank was worth."""
        if has_guess(hints):
            ranks = best_ranks(hints.gate, self.num_experts)
            np.add.at(self.num_ranked[layer], ranks, 1)
            np.add.at(self.num_right[layer], ranks[demand], 1)


def has_guess(hints: Hints) -> bool:
    """Whether any token of the call has the router's guess."""
    return any(len(ids) for ids in hints.gate)


def best_ranks(guesses: Sequence[Sequence[int]], num_experts: int) -> npt.NDArray[np.intp]:
    """The best rank that a token gives each expert, 0 the highest; num_experts where none does."""
    found = np.full(num_experts, num_experts, np.intp)
    for ids in guesses:
        ranks = np.arange(len(ids))
        found[ids] = np.minimum(found[ids], ranks)
    return found
