"""How often two experts are asked for together: in a call, and in the call it is foretold from."""

from __future__ import annotations

import numpy as np

from hotexperts.predict.base import Floats, Hints, Ids, to_log_odds
from hotexperts.predict.popularity import Popularity

PRIOR = 2.0  # calls' worth of belief that a pair is no more frequent than its target


class Pairs(Popularity):
    """Base of the predictors that count pairs; one says where the first of a pair is looked for.

    `P(e | a) = (n_ae + 2 p_e) / (n_a + 2)`: n_a calls whose origin asked for a, n_ae of which asked
    for e; p_e is the popularity.
    """

    def reset(self) -> None:
        """Forget every use."""
        super().reset()
        shape = self.num_layers, self.num_experts, self.num_experts
        self.together = np.zeros(shape, np.float32)
        self.num_from = np.zeros(shape[:2], np.float32)

    def origin(self, layer: int) -> Ids:
        """Experts that a pair may begin with in the layer's next call: its source's."""
        return self.source(layer)

    def given(self, layer: int, chance: Floats) -> Floats:
        """P(e | a) for every a of the origin, `[len(origin), num_experts]`; chance is p."""
        origin = self.origin(layer)
        seen = self.num_from[layer, origin][:, None]
        found: Floats = (self.together[layer, origin] + PRIOR * chance) / (seen + PRIOR)
        return found

    def learn(self, layer: int, demand: Ids, hints: Hints) -> None:
        """Count the pairs, and the uses."""
        origin = self.origin(layer)
        self.num_from[layer, origin] += 1
        self.together[layer][origin[:, None], demand] += 1
        super().learn(layer, demand, hints)

    def halve(self, layer: int) -> None:
        """See `Popularity`."""
        super().halve(layer)
        self.num_from[layer] *= 0.5
        self.together[layer] *= 0.5


class Markov(Pairs):
    """The mean of P(e | a) over the origin's experts a, as log-odds; popularity if it has none."""

    def log_odds(self, layer: int, hints: Hints) -> Floats:
        """See the class."""
        chance = self.chance(layer)
        rows = self.given(layer, chance)
        return to_log_odds(rows.mean(axis=0) if len(rows) else chance)


class Lift(Pairs):
    """Naive Bayes: `log(p_e / (1 - p_e)) + sum over a of log(P(e | a) / p_e)`.

    It counts as if the origin's experts spoke independently, so it is surer than it should be: good
    for ranking, and to be calibrated before it is believed.
    """

    def log_odds(self, layer: int, hints: Hints) -> Floats:
        """See the class."""
        chance = self.chance(layer)
        lift = np.log(self.given(layer, chance) / chance).sum(axis=0)
        found: Floats = to_log_odds(chance) + lift
        return found
