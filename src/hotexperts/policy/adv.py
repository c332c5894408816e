"""ADV: seven AUTOs and an LRU play in shadow, the best one's score is used."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hotexperts.policy.auto import AUTO, Averages
from hotexperts.policy.ewma import SMALLEST
from hotexperts.policy.shadow import LRUShadow, ShadowHits
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
LRU = len(SHADOWS)  # comes after them
FAST_ROW = [FAST_DECAYS.index(df) for _, df, _ in SHADOWS]
SLOW_ROW = [SLOW_DECAYS.index(ds) for _, _, ds in SHADOWS]
FAST_AT = np.array(FAST_ROW)  # in the averages of all decays
SLOW_AT = np.array(SLOW_ROW) + len(FAST_DECAYS)
FAST_WEIGHT = np.array([a for a, _, _ in SHADOWS], np.float32)[:, None]
SLOW_WEIGHT = np.array([1 - a for a, _, _ in SHADOWS], np.float32)[:, None]
DISCOUNT = np.float32(0.99)
MARGIN = np.float32(1.002)
LONG_DISCOUNT = np.float32(0.999)
MOST_REGRET = np.float32(2)  # in parts of a demand: 2 of 1000, as events are discounted
EACH = np.arange(len(SHADOWS))[:, None]
Ints: TypeAlias = npt.NDArray[np.int64]
ID_BITS = 16
HIGHEST = 0x7FFFFFFF  # no float32 that is not negative has higher bits
NOBODY = 1 << 62  # comes after every key


class ADV(AUTO):
    """AUTO that chooses its own mix, or LRU. Ours.

    Seven caches of `capacity` slots that hold no bytes start empty and follow AUTO, each with
    its own (a, df, ds) and no limit to bypassing; an eighth is LRU's. A prefill fills their free
    slots only. In every event, in this order: the two fast and five slow averages advance; each
    shadow's `score = (a * f) + (b * s)`, LRU's is the last event that demanded the expert;
    `worth = (.99 * worth) + hits`, hits judged before the shadow moves, then below 1e-30 becomes
    0; `regret = (.999 * regret) + (LRU's hits - the real cache's)`, then between -1e-30 and 1e-30
    becomes 0; the shadows move; the index for this event is chosen. It is that of the highest
    worth, the lowest of equals, if this is above `1.002 * worth[2]`, otherwise 2; but LRU's where
    the regret is above twice the demand, as who changes over often may fall behind all of those
    between whom he changes. Nothing else is remembered. The real cache then admits and evicts as
    AUTO does, with that shadow's score: with LRU's every newcomer beats every resident. All
    float32 but LRU's score, each operation rounded.

    Everybody's hits are counted as well (`shadow_hits`).
    """

    name = "adv"
    history = (
        *("held", "worth", "regret", "last_use"),
        *("shadow_totals", "lru_shadow.order", "totals"),
    )
    times = ("last_use",)
    amounts = ("worth", "shadow_totals", "totals")

    def reset(self) -> None:
        """Forget every use and empty the shadows."""
        super().reset()
        self.averages = Averages(FAST_DECAYS + SLOW_DECAYS, self.num_experts)
        self.held = np.zeros((len(SHADOWS), self.num_experts), np.bool_)
        self.worth = np.zeros(len(SHADOWS) + 1, np.float32)
        self.regret = np.zeros(1, np.float32)
        self.last_use = np.full(self.num_experts, -1, np.int64)
        self.index = HOME
        self.ids = np.arange(self.num_experts)
        self.lru_shadow = LRUShadow(self.capacity)
        self.shadow_totals = np.zeros(len(SHADOWS), np.int64)
        self.totals = [0, 0, 0]  # demands, hits of the real cache and of the LRU shadow

    def check_history(self) -> None:
        """No shadow holds more than it has slots; the regret, of either sign, is a number."""
        if not np.isfinite(self.regret).all():
            raise ValueError("regret is damaged (no finite number)")
        most = max(int(self.held.sum(axis=1).max()), len(self.lru_shadow.order))
        if most > self.capacity:
            raise ValueError(f"a shadow is damaged ({most} experts in {self.capacity} slots)")

    def record(self, event: Event) -> None:
        """Advance averages and shadows, then choose the index whose score is used."""
        used = np.array(event.demand, np.intp)
        self._advance(event, used)
        rows = self.averages.rows
        scores = FAST_WEIGHT * rows.take(FAST_AT, axis=0)
        scores += SLOW_WEIGHT * rows.take(SLOW_AT, axis=0)
        missed = ~self.held.take(used, axis=1)
        num_missed = np.add.reduce(missed, axis=1, dtype=np.int64)
        self.last_use[used] = self.tick
        self._judge(event, len(used) - num_missed)
        if num_missed.any():
            self._move(scores, used, missed, num_missed, evict=event.evict)
        best = int(self.worth.argmax())
        self.index = best if self.worth[best] > MARGIN * self.worth[HOME] else HOME
        if self.regret[0] > MOST_REGRET * np.float32(len(used)):
            self.index = LRU
        self.score = self.last_use.astype(np.float64) if self.index == LRU else scores[self.index]

    def shadow_hits(self) -> ShadowHits:
        """What every shadow would have hit since the reset, beside the real cache. Changes nothing.

        The shadows are told of every event that this policy decided, prefill included; they know
        no `max_bypassed` and lose no slot whose bytes did not arrive.
        """
        demands, own, lru = self.totals
        return ShadowHits(demands, own, lru, tuple(self.shadow_totals.tolist()))

    def _judge(self, event: Event, hits: Ints) -> None:
        """Everybody's hits: as totals, as worth, and as regret. LRU's shadow moves at once."""
        own = sum([expert in event.resident for expert in event.demand])
        lru = self.lru_shadow.use(event.demand, evict=event.evict)
        self.worth *= DISCOUNT
        self.worth[:LRU] += hits
        self.worth[LRU] += lru
        self.worth[self.worth < SMALLEST] = 0
        self.regret *= LONG_DISCOUNT
        self.regret += lru - own
        self.regret[abs(self.regret) < SMALLEST] = 0
        self.shadow_totals += hits
        for at, num in enumerate((len(event.demand), own, lru)):
            self.totals[at] += num

    def _move(
        self,
        scores: npt.NDArray[np.float32],
        used: npt.NDArray[np.intp],
        missed: npt.NDArray[np.bool_],
        num_missed: Ints,
        *,
        evict: bool,
    ) -> None:
        """AUTO's decision for every shadow at once (see `winners`), carried out in `held`.

        `missed[j, i]`: shadow j does not hold `used[i]`.
        """
        num_held = np.add.reduce(self.held, axis=1, dtype=np.int64)
        free = self.capacity - num_held
        may_leave = (num_held + num_missed - len(used)) * evict
        swaps = np.minimum(np.maximum(num_missed - free, 0), may_leave)
        bits = scores.view(np.int32).astype(np.int64)  # never negative: they order as scores do
        leaving = self.held.copy()
        leaving[:, used] = False
        weakest = _ordered(bits, self.ids, leaving)[:, : int(swaps.max())]
        if evict and self._forces(len(used)):  # then everybody finds a place
            self.held[:, used] = True
        else:
            strongest = _ordered(HIGHEST - bits.take(used, axis=1), used, missed)
            swaps = _count_wins(strongest, weakest, free, swaps)
            self.held[_first(strongest, np.minimum(num_missed, free + swaps))] = True
        self.held[_first(weakest, swaps)] = False


def _ordered(bits: Ints, experts: npt.NDArray[np.intp], among: npt.NDArray[np.bool_]) -> Ints:
    """Keys of score bits and expert, ascending in each row; those not `among` come last."""
    keys = np.where(among, (bits << ID_BITS) | experts, NOBODY)
    keys.sort(axis=1)
    return keys


def _count_wins(strongest: Ints, weakest: Ints, free: Ints, swaps: Ints) -> Ints:
    """How many of at most `swaps` challengers have a higher score than their opponents."""
    turn = np.arange(weakest.shape[1])
    challenger = np.minimum(turn + free[:, None], strongest.shape[1] - 1)
    bits = HIGHEST - (strongest[EACH, challenger] >> ID_BITS)
    wins = (bits > weakest >> ID_BITS) & (turn < swaps[:, None])
    num_wins: Ints = np.add.reduce(wins, axis=1, dtype=np.int64)
    return num_wins


def _first(keys: Ints, num: Ints) -> tuple[npt.NDArray[np.intp], Ints]:
    """Row and expert of the first `num[row]` keys of each row."""
    among = np.arange(keys.shape[1]) < num[:, None]
    return among.nonzero()[0], keys[among] & (1 << ID_BITS) - 1
