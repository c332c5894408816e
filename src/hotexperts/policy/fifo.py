"""FIFO: the expert that entered first leaves first."""

from __future__ import annotations

from collections.abc import Sequence

from hotexperts.policy.base import Policy
from hotexperts.types import Event


class FIFO(Policy):
    """First in, first out: uses do not matter, only the time of entry."""

    name = "fifo"
    history = times = ("entered_at",)

    def reset(self) -> None:
        """Forget every entry."""
        super().reset()
        self.entered_at = [-1] * self.num_experts

    def record(self, event: Event) -> None:
        """Only time passes."""
        self.tick += 1

    def eviction_key(self, expert: int) -> int:
        """Time of entry."""
        return self.entered_at[expert]

    def moved(self, admitted: Sequence[int], victims: Sequence[int]) -> None:
        """Stamp the newcomers."""
        for expert in admitted:
            self.entered_at[expert] = self.tick
