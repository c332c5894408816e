"""EWMA: how often a layer asked for each expert lately."""

from __future__ import annotations

import numpy as np

from hotexperts.predict.base import Floats, Hints, Ids, Predictor, to_log_odds

DOUBT = 0.02  # the part of a chance that is the base rate's: an average may be 0 or 1


class Ewma(Predictor):
    """An average of use with exponential decay, the score of the policy of that name.

    `s = d s + (1 - d) use` after each call, `p = .98 s + .02 base`; base is k / E. Averages start
    at the base rate.

    Args:
        num_layers: see `Predictor`.
        num_experts: see `Predictor`.
        top_k: see `Predictor`.
        ahead: see `Predictor`; no matter here.
        with_gate: see `Predictor`; no matter here.
        decay: d.
    """

    name = "ewma"

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        ahead: int = 1,
        *,
        with_gate: bool = False,
        decay: float = 0.95,
    ) -> None:
        self.decay = np.float32(decay)
        super().__init__(num_layers, num_experts, top_k, ahead, with_gate=with_gate)

    def reset(self) -> None:
        """Forget every use."""
        super().reset()
        self.average = np.full((self.num_layers, self.num_experts), self.base, np.float32)

    def log_odds(self, layer: int, hints: Hints) -> Floats:
        """See the class."""
        return to_log_odds((1 - DOUBT) * self.average[layer] + DOUBT * self.base)

    def learn(self, layer: int, demand: Ids, hints: Hints) -> None:
        """Decay, then add."""
        average = self.average[layer]
        average *= self.decay
        average[demand] += 1 - self.decay
