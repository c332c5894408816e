"""One score for who leaves and who enters: a newcomer has to beat whom it would replace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hotexperts.policy.base import Policy


class Challenge(Policy):
    """A policy whose misses enter only where they score higher than a resident that may leave.

    Attributes:
        score: `[num_experts]`, set before each decision; the lowest leaves first.
    """

    score: npt.NDArray[np.floating[Any]]

    def eviction_key(self, expert: int) -> float:
        """The score."""
        return self.score.item(expert)

    def admit(
        self,
        misses: Sequence[int],
        candidates: Sequence[int],
        free: int,
        num_demanded: int,
        max_bypassed: int,
    ) -> Sequence[int]:
        """Those that beat a resident; all, where the policy forces them in."""
        forced = self._forces(num_demanded)
        return winners(self.score, misses, candidates, free, max_bypassed, forced=forced)

    def _forces(self, num_demanded: int) -> bool:
        """Whether every miss enters in an event that demands so many."""
        return False


def winners(
    score: npt.NDArray[np.floating[Any]],
    misses: Sequence[int],
    candidates: Sequence[int],
    free: int,
    max_bypassed: int,
    *,
    forced: bool,
) -> list[int]:
    """AUTO's admission: which misses enter, best first.

    Args:
        score: of every expert.
        misses: ascending ids.
        candidates: residents that may leave, in eviction order.
        free: free slots.
        max_bypassed: at most so many pass by although there is a candidate left.
        forced: none passes by while there is a candidate left.
    """
    if len(misses) <= free + (len(candidates) if forced else 0):
        return list(misses)
    missed = np.array(misses, np.intp)
    leaving = np.array(candidates, np.intp)
    ranked = missed[np.argsort(-score[missed], kind="stable")]
    challengers = ranked[free : free + len(candidates)]
    swaps = len(challengers)
    if not forced:
        wins = np.count_nonzero(score[challengers] > score[leaving[:swaps]])
        swaps = max(int(wins), swaps - max_bypassed)
    return [int(expert) for expert in ranked[: free + swaps]]
