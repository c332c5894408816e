"""Predictors that need not learn, for replays whose guesses are known beforehand."""

from __future__ import annotations

import numpy as np

from hotexperts.predict.base import Floats, Hints, Ids, Predictor

EXPERTS = 8


class Scripted(Predictor):
    """Sure of those e for which (5 e + 3 layer + calls of the layer so far) mod 4 is 0."""

    name = "scripted"

    def reset(self) -> None:
        super().reset()
        self.calls = [0] * self.num_layers

    def log_odds(self, layer: int, hints: Hints) -> Floats:
        wanted = script(layer, self.calls[layer])
        return np.array([12.0 if e in wanted else -12.0 for e in range(self.num_experts)], "f")

    def learn(self, layer: int, demand: Ids, hints: Hints) -> None:
        self.calls[layer] += 1


class Nothing(Scripted):
    """Expects nobody."""

    def log_odds(self, layer: int, hints: Hints) -> Floats:
        return np.full(self.num_experts, -12.0, "f")


class Wrong(Predictor):
    """Sure of all that is not demanded."""

    name = "wrong"

    def log_odds(self, layer: int, hints: Hints) -> Floats:
        return np.array([-12.0 if e in hints.truth else 12.0 for e in range(self.num_experts)], "f")

    def learn(self, layer: int, demand: Ids, hints: Hints) -> None: ...


def script(layer: int, call: int) -> list[int]:
    return [e for e in range(EXPERTS) if (5 * e + 3 * layer + call) % 4 == 0]
