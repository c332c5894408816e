"""Random: anybody may leave."""

from __future__ import annotations

import random

from hotexperts.policy.base import Policy
from hotexperts.types import Event


class Random(Policy):
    """Uniformly random victims, the floor of every comparison.

    Each event draws one order of all experts, whoever is resident, so that it depends on the seed
    and the number of the event alone; `reset` begins again at the seed.

    Args:
        num_experts: see `Policy`.
        capacity: see `Policy`.
        seed: of the draws.
    """

    name = "random"
    settings = ("seed",)
    history = ("draw", "place")

    def __init__(self, num_experts: int, capacity: int, *, seed: int = 0) -> None:
        self.seed = seed
        super().__init__(num_experts, capacity)

    def reset(self) -> None:
        """Begin again at the seed."""
        super().reset()
        self.draw = random.Random(self.seed)
        self.place = list(range(self.num_experts))

    def record(self, event: Event) -> None:
        """Draw this event's order."""
        self.draw.shuffle(self.place)
        self.tick += 1

    def eviction_key(self, expert: int) -> int:
        """Place in the drawn order."""
        return self.place[expert]
