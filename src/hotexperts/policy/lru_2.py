"""LRU-2: the expert whose second-last use is longest ago leaves."""

from __future__ import annotations

from hotexperts.policy.lru import LRU
from hotexperts.types import Event


class LRU2(LRU):
    """LRU-K with K = 2 (O'Neil, O'Neil and Weikum, SIGMOD 1993).

    Whoever was used less than twice leaves first; equal second-last uses: the older last use
    leaves first, the paper's subsidiary LRU. Our reading: an event is one use, so that the
    correlated reference period is one event; history is kept for all experts, resident or not,
    and never purged (there are so few that the retained information period need not end).
    """

    name = "lru-2"
    history = times = ("second_last_use",)

    def reset(self) -> None:
        """Forget every use."""
        super().reset()
        self.second_last_use = [-1] * self.num_experts

    def record(self, event: Event) -> None:
        """Shift the demanded experts' uses and stamp them."""
        for expert in event.demand:
            self.second_last_use[expert] = self.last_use[expert]
        super().record(event)

    def eviction_key(self, expert: int) -> tuple[int, int]:
        """Time of the second-last use, then of the last."""
        return self.second_last_use[expert], self.last_use[expert]
