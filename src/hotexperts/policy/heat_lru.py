"""Heat-protected LRU: what was hit often is passed over."""

from __future__ import annotations

from collections.abc import Sequence

from hotexperts.policy.lru import LRU
from hotexperts.types import Event

MAX_COLD_HITS = 4
COOLING_PERIOD_PER_SLOT = 10


class HeatLRU(LRU):
    """LRU that skips hot slots (TheTom/llama-cpp-turboquant, pull request 300).

    Every slot counts the hits of its expert since it entered. The least recently used expert
    with at most 4 hits leaves; hot ones, with more, only when there are no others. In the
    source counts never decay, so that an old hot set stays. Here they do, our addition: after
    each 10 x capacity uses, LFU's period, all counts are halved, rounding down.
    """

    name = "heat-lru"
    history = ("heat", "uses_since_cooling")
    counts = ("heat",)
    amounts = ("uses_since_cooling",)

    def reset(self) -> None:
        """Forget every use."""
        super().reset()
        self.heat = [0] * self.num_experts
        self.uses_since_cooling = 0

    def record(self, event: Event) -> None:
        """Stamp the demanded experts, count the hits, cool when the period is over."""
        super().record(event)
        for expert in event.demand:
            if expert in event.resident:
                self.heat[expert] += 1
        self.uses_since_cooling += len(event.demand)
        if self.uses_since_cooling >= COOLING_PERIOD_PER_SLOT * self.capacity:
            self.heat = [heat // 2 for heat in self.heat]
            self.uses_since_cooling = 0

    def eviction_key(self, expert: int) -> tuple[bool, int]:
        """Cold before hot, then time of the last use."""
        return self.heat[expert] > MAX_COLD_HITS, self.last_use[expert]

    def moved(self, admitted: Sequence[int], victims: Sequence[int]) -> None:
        """Newcomers start cold."""
        for expert in admitted:
            self.heat[expert] = 0
