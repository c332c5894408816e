"""LCP: a use count that shrinks with the time since the last use."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotexperts.policy.lfru import LFRU

NU = 0.9
MAX_AGE = 511  # .001 x .9^511 is 4e-27: no score is ever denormal
UNUSED = np.float32(0.001)  # among experts that were never used age still decides
TABLE = np.array([NU**age for age in range(MAX_AGE + 1)], np.float32)  # powers in double


class LCP(LFRU):
    """Least cache priority: count times nu to the power of the age, nu = .9.

    `score = (float32(count) + .001) * table[min(t - last, 511)]` with
    `table[n] = float32(.9^n)`: one addition, one multiplication. The primary source of the rule
    was not found (MoEpic, arXiv 2509.08342, is a candidate); this form is ours.
    """

    name = "lcp"

    def _score(self, age: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        count = self.count.astype(np.float32)
        score: npt.NDArray[np.float32] = (count + UNUSED) * TABLE[np.minimum(age, MAX_AGE)]
        return score
