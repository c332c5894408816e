"""LRU: the expert whose last use is longest ago leaves."""

from __future__ import annotations

from typing import Any, ClassVar

from hotexperts.policy.base import Policy
from hotexperts.types import Event


class LRU(Policy):
    """Least recently used, by layer call: all experts of one call share its time.

    Classic; the baseline of every comparison.
    """

    name = "lru"
    history: ClassVar[tuple[str, ...]] = ("last_use",)
    times: ClassVar[tuple[str, ...]] = ("last_use",)

    def reset(self) -> None:
        """Forget every use."""
        super().reset()
        self.last_use = [-1] * self.num_experts

    def record(self, event: Event) -> None:
        """Stamp the demanded experts with this event's time."""
        for expert in event.demand:
            self.last_use[expert] = self.tick
        self.tick += 1

    def eviction_key(self, expert: int) -> Any:
        """Time of the last use."""
        return self.last_use[expert]
