"""Combined: what the predictors say, weighed in log-odds, with a correction learned on top."""

from __future__ import annotations

import numpy as np

from hotexperts.predict.base import Floats, Hints, Ids, Predictor, cut, to_chance
from hotexperts.predict.cross_lift import CrossLift
from hotexperts.predict.ewma import Ewma
from hotexperts.predict.gate import Gate, best_ranks, has_guess
from hotexperts.predict.online import Dense, Rows, Table
from hotexperts.predict.popularity import Popularity
from hotexperts.predict.previous import Previous
from hotexperts.predict.temporal_lift import TemporalLift

DENSE_RATE = TABLE_RATE = 0.05
FIRST_WEIGHT = 0.2  # of each member, where there is no gate to begin with
NUM_SOURCES = 5  # calls in a row that a lift is counted from
TOP = 2.0  # x of the gate's first rank; falls to 0 after the last


class Combined(Predictor):
    """`z_e = w_0 + sum over members m of w_m z_me + b_e + sum over rows r of x_r W_re`. Ours.

    Members: `gate` where there is one, `ewma` with decays .8 and .95, `popularity`, `previous`,
    `temporal-lift`, and `cross-lift` from the source and from each of the four calls before it, as
    far as they are other layers'. Rows: the source's experts and the layer's own a token ago
    (x = 1), and those that the gate guesses, x falling in equal steps from 2 at the first rank. All
    w, b and W of a layer are stepped together by AdaGrad on the log loss of each call (`online`,
    rate .05). At first the gate's w is 1 and the others 0, or where there is no gate the members' w
    are 1/5 each.
    """

    name = "combined"

    def reset(self) -> None:
        """Forget everything learned."""
        super().reset()
        shape = self.num_layers, self.num_experts, self.top_k, self.ahead
        # As many calls before is the layer itself, of which temporal-lift knows already.
        furthest = min(self.ahead + NUM_SOURCES, self.num_layers)
        distances = range(self.ahead, max(furthest, self.ahead + 1))
        gates: list[Predictor] = [Gate(*shape, with_gate=True)] if self.with_gate else []
        self.members: list[Predictor] = [
            *gates,
            Ewma(*shape, decay=0.8),
            Ewma(*shape),
            Popularity(*shape),
            Previous(*shape),
            TemporalLift(*shape),
            *(CrossLift(*shape[:3], distance) for distance in distances),
        ]
        num_others = len(self.members) - len(gates)
        weights = [1.0] * len(gates) + [0.0 if gates else FIRST_WEIGHT] * num_others
        self.dense = Dense(self.num_layers, [*weights, 0.0], DENSE_RATE)
        num_rows = (3 if gates else 2) * self.num_experts + 1
        self.table = Table(self.num_layers, num_rows, self.num_experts, TABLE_RATE)

    def log_odds(self, layer: int, hints: Hints) -> Floats:
        """See the class."""
        return self._mixed(layer, self._features(layer, hints), self._rows(layer, hints))

    def learn(self, layer: int, demand: Ids, hints: Hints) -> None:
        """Step all weights, then let the members learn."""
        features, rows = self._features(layer, hints), self._rows(layer, hints)
        error = to_chance(self._mixed(layer, features, rows)) - self.uses(demand)
        self.dense.learn(layer, features, error)
        self.table.learn(layer, rows, error)
        for member in self.members:
            member.observe(layer, demand, hints)

    def _mixed(self, layer: int, features: Floats, rows: Rows) -> Floats:
        return cut(self.dense.apply(layer, features) + self.table.apply(layer, rows))

    def _features(self, layer: int, hints: Hints) -> Floats:
        found = [member.log_odds(layer, hints) for member in self.members]
        return np.stack([*found, np.ones(self.num_experts, np.float32)])

    def _rows(self, layer: int, hints: Hints) -> Rows:
        """The source's experts, the layer's own last, what is always the case, the guessed ones."""
        always = 2 * self.num_experts
        which = [self.source(layer), self.last[layer] + self.num_experts, np.array([always])]
        value = [np.ones(sum(map(len, which)), np.float32)]
        if self.with_gate and has_guess(hints):
            ranks = best_ranks(hints.gate, self.num_experts)
            guessed = np.flatnonzero(ranks < self.num_experts)
            num_ranks = max(len(ids) for ids in hints.gate)
            which.append(guessed + always + 1)
            value.append((TOP * (1 - ranks[guessed] / num_ranks)).astype(np.float32))
        return np.concatenate(which), np.concatenate(value)
