"""Static: a fixed profile says who is hot; uses do not matter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotexperts.errors import ConfigError
from hotexperts.policy.challenge import Challenge
from hotexperts.types import Event


class Static(Challenge):
    """A fixed hot set, the reference that never adapts.

    A miss enters a free slot, or the coldest resident's if the profile has it strictly hotter;
    otherwise it passes by, as in a busy call of AUTO (see `winners`). So the hot set fills as it
    is used, and stays: nothing is loaded ahead, unlike the preloaded set in the tables.

    Args:
        num_experts: see `Policy`.
        capacity: see `Policy`.
        profile: heat of every expert (uses counted elsewhere, say), compared as float32. None:
            all alike, so that whoever came first stays.
    """

    name = "static"
    settings = ("heat",)

    def __init__(
        self, num_experts: int, capacity: int, *, profile: Sequence[float] | None = None
    ) -> None:
        self.heat = self.score = np.zeros(num_experts, np.float32)
        if profile is not None:
            if len(profile) != num_experts:
                raise ConfigError(f"profile has {len(profile)} values: give {num_experts}")
            self.heat[:] = profile
        super().__init__(num_experts, capacity)

    def record(self, event: Event) -> None:
        """Only time passes."""
        self.tick += 1
