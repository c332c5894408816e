"""LFRU: frequency divided by recency; the smallest quotient leaves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotexperts.policy.base import Policy
from hotexperts.types import Event


class LFRU(Policy):
    """Least frequently and recently used (as replayed in arXiv 2608.07911).

    `score = float32(count) / float32(t - last + 1)`, one division; t is the time of this event,
    `last` that of the expert's last use. Both are int32, and counts never decay, resident or not.
    Neither operand is ever 0 / 0, and no quotient is near float32's denormal range.
    """

    name = "lfru"
    history = ("count", "last_use")
    times = ("last_use",)
    counts = ("count",)

    def reset(self) -> None:
        """Forget every use."""
        super().reset()
        self.count = np.zeros(self.num_experts, np.int32)
        self.last_use = np.full(self.num_experts, -1, np.int32)
        self.score = np.zeros(self.num_experts, np.float32)

    def record(self, event: Event) -> None:
        """Count and stamp the demanded experts, then score all."""
        used = list(event.demand)
        self.count[used] += 1
        self.last_use[used] = self.tick
        self.score = self._score(self.tick - self.last_use)
        self.tick += 1

    def eviction_key(self, expert: int) -> float:
        """Uses per time since the last one."""
        return self.score.item(expert)

    def _score(self, age: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        count, wait = self.count.astype(np.float32), (age + 1).astype(np.float32)
        score: npt.NDArray[np.float32] = np.divide(count, wait)
        return score
