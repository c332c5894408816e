"""Reuse distance: who is expected back sooner than a resident takes its place."""

from __future__ import annotations

import numpy as np

from hotexperts.policy.challenge import Challenge
from hotexperts.types import Event

SHARE = 0.1  # of the newest gap in the average


class ReuseDistance(Challenge):
    """Admission by predicted reuse distance, the idea of arXiv 2608.07911, section 7.

    Our reading, with no claim about the paper's predictor or figures. An expert's mean gap
    between uses, in events, is `gap = gap + (.1 * (wait - gap))` with the time since its last
    use as `wait`. At its first use it is num_experts / |demand|, as if all took turns. Its next
    use is predicted from the mean and from the gap that is open now, both alike:
    `distance = gap + (t - last)`, twice their average. Who was never used has gap 0 and waits
    since the start. All in double.

    The resident with the largest distance leaves first. Misses are ranked by distance, ties by
    id, and challenge the residents as in a busy call of AUTO (see `winners`): each enters only
    if its distance is strictly smaller than its opponent's, save that no more than
    `max_bypassed` pass by.
    """

    name = "reuse-distance"
    history = ("gap", "last_use")
    times = ("last_use",)
    amounts = ("gap",)

    def reset(self) -> None:
        """Forget every use."""
        super().reset()
        self.gap = np.zeros(self.num_experts)
        self.last_use = np.full(self.num_experts, -1.0)
        self.score = np.zeros(self.num_experts)

    def record(self, event: Event) -> None:
        """Average the gaps that end here, then predict for all."""
        used = list(event.demand)
        gap, last_use = self.gap[used], self.last_use[used]
        first = self.num_experts / max(1, len(used))
        later = gap + (SHARE * (self.tick - last_use - gap))
        self.gap[used] = np.where(last_use < 0, first, later)
        self.last_use[used] = self.tick
        self.score = -(self.gap + (self.tick - self.last_use))
        self.tick += 1
