"""Logistic: what the source and the last token asked for, with weights learned as it goes."""

from __future__ import annotations

import numpy as np

from hotexperts.predict.base import Floats, Hints, Ids, Predictor, cut, to_chance, to_log_odds
from hotexperts.predict.online import Rows, Table

RATE = 0.1


class Logistic(Predictor):
    """`z_e = z_0 + b_e + sum over a of W_ae + sum over c of V_ce`, learned online.

    a are the source's experts, c the layer's own a token ago, z_0 the log-odds of k / E. All
    weights start at 0 and are stepped by AdaGrad on the log loss of each call (`online.Table`, rate
    .1).
    """

    name = "logistic"

    def reset(self) -> None:
        """Forget all weights."""
        super().reset()
        self.start = to_log_odds(np.float32(self.base))
        self.table = Table(self.num_layers, 2 * self.num_experts + 1, self.num_experts, RATE)

    def log_odds(self, layer: int, hints: Hints) -> Floats:
        """See the class."""
        return cut(self.start + self.table.apply(layer, self.rows(layer)))

    def learn(self, layer: int, demand: Ids, hints: Hints) -> None:
        """Step towards what was demanded."""
        error = to_chance(self.log_odds(layer, hints)) - self.uses(demand)
        self.table.learn(layer, self.rows(layer), error)

    def rows(self, layer: int) -> Rows:
        """The source's experts, the layer's own last ones, and the row that is always the case."""
        always = 2 * self.num_experts
        found = np.concatenate([self.source(layer), self.last[layer] + self.num_experts, [always]])
        return found, np.ones(len(found), np.float32)
