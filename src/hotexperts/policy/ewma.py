"""EWMA: every use counts, the older the less."""

from __future__ import annotations

import numpy as np

from hotexperts.policy.base import Policy
from hotexperts.types import Event

DECAY = np.float32(0.95)
SMALLEST = np.float32(1e-30)  # below it a score becomes 0, long before float32 turns denormal


class EWMA(Policy):
    """Exponentially weighted count of uses, LRFU's score (Lee et al., IEEE TC 50(12), 2001).

    `s = (.95 * s) + use`, use = 1 for the demanded and 0 for the others; then whatever is below
    1e-30 becomes 0. All float32, over all experts, resident or not.
    """

    name = "ewma"
    history = amounts = ("score",)

    def reset(self) -> None:
        """Forget every use."""
        super().reset()
        self.score = np.zeros(self.num_experts, np.float32)

    def record(self, event: Event) -> None:
        """Decay all scores and add the uses."""
        use = np.zeros(self.num_experts, np.float32)
        use[list(event.demand)] = 1
        self.score = (DECAY * self.score) + use
        self.score[self.score < SMALLEST] = 0
        self.tick += 1

    def eviction_key(self, expert: int) -> float:
        """Decayed count."""
        return self.score.item(expert)
