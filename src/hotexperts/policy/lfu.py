"""LFU with ageing: the expert with the fewest recent uses leaves."""

from __future__ import annotations

from hotexperts.policy.base import Policy
from hotexperts.types import Event

ONE_USE = 1 << 16  # fixed point, so that halving loses nothing that matters and a kernel agrees
AGEING_PERIOD_PER_SLOT = 10


class LFU(Policy):
    """Least frequently used over all experts, resident or not, aged by halving.

    Every expert has a counter (there are so few that ghosts cost nothing). After each
    10 x capacity uses all counters are halved, as TinyLFU ages its sketch (Einziger, Friedman and
    Manes, arXiv 1512.00727): without it a stale hot set survives a change of topic. Counters are
    int32 with 16 fractional bits: between halvings one gains at most 10 x capacity + num_experts
    uses, so at 512 experts it stays below 2^31. Equal counts: the older use leaves first.
    """

    name = "lfu"
    history = ("count", "last_use", "uses_since_halving")
    times = ("last_use",)
    amounts = ("count", "uses_since_halving")

    def reset(self) -> None:
        """Forget every use."""
        super().reset()
        self.count = [0] * self.num_experts
        self.last_use = [-1] * self.num_experts
        self.uses_since_halving = 0

    def record(self, event: Event) -> None:
        """Count the demanded experts, then halve all counters when the period is over."""
        for expert in event.demand:
            self.count[expert] += ONE_USE
            self.last_use[expert] = self.tick
        self.uses_since_halving += len(event.demand)
        if self.uses_since_halving >= AGEING_PERIOD_PER_SLOT * self.capacity:
            self.count = [count >> 1 for count in self.count]
            self.uses_since_halving = 0
        self.tick += 1

    def eviction_key(self, expert: int) -> tuple[int, int]:
        """Aged count, then time of the last use."""
        return self.count[expert], self.last_use[expert]
