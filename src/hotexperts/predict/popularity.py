"""Popularity: how often a layer asked for each expert so far."""

from __future__ import annotations

import numpy as np

from hotexperts.predict.base import Floats, Hints, Ids, Predictor, to_log_odds

PRIOR = 2.0  # calls' worth of belief in the base rate
MOST_CALLS = 2.0**22  # then counts are halved, for float32 counts up to 2**24 and no further


class Popularity(Predictor):
    """The share of a layer's calls that asked for the expert.

    `p = (n_e + 2 base) / (n + 2)`: n calls of the layer, n_e of which asked for e; base is k / E.
    After some four million calls what was counted so far weighs half, and so again and again.
    """

    name = "popularity"

    def reset(self) -> None:
        """Forget every use."""
        super().reset()
        self.num_calls = np.zeros(self.num_layers, np.float32)
        self.count = np.zeros((self.num_layers, self.num_experts), np.float32)

    def chance(self, layer: int) -> Floats:
        """P of every expert."""
        seen = self.num_calls[layer] + PRIOR
        found: Floats = (self.count[layer] + PRIOR * self.base) / seen
        return found

    def log_odds(self, layer: int, hints: Hints) -> Floats:
        """See the class."""
        return to_log_odds(self.chance(layer))

    def learn(self, layer: int, demand: Ids, hints: Hints) -> None:
        """Count."""
        self.num_calls[layer] += 1
        self.count[layer, demand] += 1
        if self.num_calls[layer] >= MOST_CALLS:
            self.halve(layer)

    def halve(self, layer: int) -> None:
        """Let all calls so far weigh half."""
        self.num_calls[layer] *= 0.5
        self.count[layer] *= 0.5
