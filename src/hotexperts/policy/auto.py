"""AUTO: a fast and a slow average of use; a busy call must beat the residents to enter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hotexperts.policy.challenge import Challenge
from hotexperts.policy.ewma import SMALLEST
from hotexperts.types import Event


class Averages:
    """Decayed averages of the experts' use, float32 `[len(decays), num_experts]`."""

    def __init__(self, decays: Sequence[float], num_experts: int) -> None:
        self.decay = np.array(decays, np.float32)[:, None]
        self.weight = np.array([1 - decay for decay in decays], np.float32)[:, None]
        self.rows = np.zeros((len(decays), num_experts), np.float32)

    def add(self, use: npt.NDArray[np.float32]) -> None:
        """One event: `rows = (decay * rows) + (weight * use)`, then below 1e-30 becomes 0."""
        self.rows *= self.decay
        self.rows += self.weight * use
        self.rows[self.rows < SMALLEST] = 0


class AUTO(Challenge):
    """Two-timescale average with adaptive bypass. Ours.

    Routing has a small recency and a large, slow popularity component, so the score mixes both:
    `f = (df * f) + (wf * m)`, `s = (ds * s) + (ws * m)`, `score = (a * f) + (b * s)`, where
    m = sqrt(tokens routed to the expert in the event), 0 for the others. wf, ws and b are
    `float32(1 - df)` and so on, subtracted in double; all else is float32. An average below
    1e-30 becomes 0.

    Misses are ranked by descending score, ties by ascending id; the first ones take the free
    slots. The next ones challenge the residents outside the demand, the i-th miss the i-th in
    eviction order. While 10 |demand| <= 6 capacity each of them enters; in a busier call only
    those with a score strictly above their opponent's (misses descend and residents ascend, so
    they are the first ones), and of the others so many that no more than `max_bypassed` pass by.

    Args:
        num_experts: see `Policy`.
        capacity: see `Policy`.
        a: weight of the fast average.
        df: its decay an event.
        ds: decay of the slow average.
    """

    name = "auto"
    settings = ("a", "df", "ds")
    history: ClassVar[tuple[str, ...]] = ("averages.rows",)
    amounts: ClassVar[tuple[str, ...]] = ("averages.rows",)

    def __init__(
        self, num_experts: int, capacity: int, *, a: float = 0.4, df: float = 0.8, ds: float = 0.97
    ) -> None:
        self.a, self.df, self.ds = a, df, ds
        self.mix = np.array([[a], [1 - a]], np.float32)
        super().__init__(num_experts, capacity)

    def reset(self) -> None:
        """Forget every use."""
        super().reset()
        self.averages = Averages((self.df, self.ds), self.num_experts)
        self.score = np.zeros(self.num_experts, np.float32)

    def record(self, event: Event) -> None:
        """Advance both averages and mix them."""
        self._advance(event, np.array(event.demand, np.intp))
        fast, slow = self.mix * self.averages.rows
        self.score = fast + slow

    def _advance(self, event: Event, used: npt.NDArray[np.intp]) -> None:
        use = np.zeros(self.num_experts, np.float32)
        use[used] = np.sqrt(np.array(event.counts, np.float32))
        self.averages.add(use)
        self.tick += 1

    def _forces(self, num_demanded: int) -> bool:
        """A light call's misses all enter."""
        return 10 * num_demanded <= 6 * self.capacity
