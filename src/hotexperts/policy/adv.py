"""ADV: seven AUTOs play in shadow, the best one's score is used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotexperts.policy.auto import AUTO, Averages
from hotexperts.policy.ewma import SMALLEST
from hotexperts.types import Event

FAST_DECAYS = (0.5, 0.8)
SLOW_DECAYS = (0.9, 0.95, 0.97, 0.985, 0.99)
SHADOWS = (  # (a, df, ds) of each
    (1.0, 0.5, 0.9),
    (0.6, 0.8, 0.97),
    (0.4, 0.8, 0.97),
    (0.3, 0.8, 0.985),
    (0.2, 0.8, 0.99),
    (0.0, 0.8, 0.95),
    (0.0, 0.8, 0.9),
)
HOME = 2  # AUTO's own parameters
FAST_ROW = [FAST_DECAYS.index(df) for _, df, _ in SHADOWS]
SLOW_ROW = [SLOW_DECAYS.index(ds) for _, _, ds in SHADOWS]
FAST_WEIGHT = np.array([a for a, _, _ in SHADOWS], np.float32)[:, None]
SLOW_WEIGHT = np.array([1 - a for a, _, _ in SHADOWS], np.float32)[:, None]
DISCOUNT = np.float32(0.99)
MARGIN = np.float32(1.002)


class ADV(AUTO):
    """AUTO that chooses its own mix. Ours.

    Seven caches of `capacity` slots that hold no bytes start empty and follow AUTO, each with
    its own (a, df, ds) and no limit to bypassing; a prefill fills their free slots only. In every
    event, in this order: the two fast and five slow averages advance; each shadow's
    `score = (a * f) + (b * s)`; `worth = (.99 * worth) + hits`, hits judged before the shadow
    moves, then below 1e-30 becomes 0; the shadows move; the index for this event is chosen. It is
    that of the highest worth, the lowest of equals, if this is above `1.002 * worth[2]`,
    otherwise 2: nothing else is remembered. The real cache then admits and evicts as AUTO does,
    with that shadow's score. All float32, each operation rounded.
    """

    name = "adv"

    def reset(self) -> None:
        """Forget every use and empty the shadows."""
        super().reset()
        self.fast = Averages(FAST_DECAYS, self.num_experts)
        self.slow = Averages(SLOW_DECAYS, self.num_experts)
        self.held = np.zeros((len(SHADOWS), self.num_experts), np.bool_)
        self.worth = np.zeros(len(SHADOWS), np.float32)
        self.index = HOME

    def record(self, event: Event) -> None:
        """Advance averages and shadows, then choose the index whose score is used."""
        self._advance(event)
        fast = FAST_WEIGHT * self.fast.rows[FAST_ROW]
        scores = fast + (SLOW_WEIGHT * self.slow.rows[SLOW_ROW])
        demanded = np.zeros(self.num_experts, np.bool_)
        demanded[list(event.demand)] = True
        hits = np.count_nonzero(self.held & demanded, axis=1)
        self.worth = (DISCOUNT * self.worth) + hits.astype(np.float32)
        self.worth[self.worth < SMALLEST] = 0
        self._move(scores, demanded, evict=event.evict)
        best = int(np.argmax(self.worth))
        self.index = best if self.worth[best] > MARGIN * self.worth[HOME] else HOME
        self.score = scores[self.index]

    def _move(
        self, scores: npt.NDArray[np.float32], demanded: npt.NDArray[np.bool_], *, evict: bool
    ) -> None:
        """AUTO's decision for every shadow at once (see `winners`), carried out in `held`."""
        held = self.held
        missed, may_leave = demanded & ~held, held & ~demanded & evict
        num_missed = np.count_nonzero(missed, axis=1)
        free = self.capacity - np.count_nonzero(held, axis=1)
        best_first = np.argsort(np.where(missed, -scores, np.inf), axis=1, kind="stable")
        worst_first = np.argsort(np.where(may_leave, scores, np.inf), axis=1, kind="stable")
        swaps = np.minimum(np.maximum(num_missed - free, 0), np.count_nonzero(may_leave, axis=1))
        place = np.arange(self.num_experts)
        if not self._forces(int(np.count_nonzero(demanded))):
            challengers = np.minimum(place + free[:, None], self.num_experts - 1)
            challengers = np.take_along_axis(best_first, challengers, axis=1)
            wins = np.take_along_axis(scores, challengers, axis=1) > np.take_along_axis(
                scores, worst_first, axis=1
            )
            swaps = np.count_nonzero(wins & (place < swaps[:, None]), axis=1)
        num_entered = np.minimum(num_missed, free + swaps)
        num_left = np.maximum(num_entered - free, 0)
        enters, leaves = np.empty_like(held), np.empty_like(held)
        np.put_along_axis(enters, best_first, place < num_entered[:, None], axis=1)
        np.put_along_axis(leaves, worst_first, place < num_left[:, None], axis=1)
        self.held = (held & ~leaves) | enters
