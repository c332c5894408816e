"""Previous token: a layer asks for the same experts again."""

from __future__ import annotations

import numpy as np

from hotexperts.predict.base import Floats, Hints, Ids, Predictor, to_log_odds


class Previous(Predictor):
    """Two chances a layer: of experts in its last demand, and of the others.

    `p = (uses + base) / (chances + 1)`, counted over the layer's calls for the one and the other
    kind; base is k / E. Until something is known both are the base rate.
    """

    name = "previous"

    def reset(self) -> None:
        """Forget every use."""
        super().reset()
        self.num_uses = np.zeros((self.num_layers, 2), np.float32)  # of others, of the last
        self.num_chances = np.zeros((self.num_layers, 2), np.float32)

    def log_odds(self, layer: int, hints: Hints) -> Floats:
        """See the class."""
        chance = (self.num_uses[layer] + self.base) / (self.num_chances[layer] + 1)
        was_used = self.uses(self.last[layer]).astype(np.intp)
        return to_log_odds(chance)[was_used]

    def learn(self, layer: int, demand: Ids, hints: Hints) -> None:
        """Count both kinds."""
        last = self.last[layer]
        again = self.uses(last)[demand].sum()
        self.num_uses[layer] += (len(demand) - again, again)
        self.num_chances[layer] += (self.num_experts - len(last), len(last))
