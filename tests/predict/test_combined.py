"""The combination against its formula, written out in dictionaries and double precision."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import numpy as np
import pytest

from hotexperts.predict import PREDICTORS, Hints, Predictor

LAYERS, EXPERTS, TOP_K, RATE, START = 3, 6, 2, 0.05, 1e-3


class Twin:
    """Weights by layer and name; members are the registered predictors, which have own tests."""

    def __init__(self, *, with_gate: bool) -> None:
        names = ["popularity", "previous", "temporal-lift", "cross-lift"]
        self.members: list[Predictor] = [self.made("ewma", decay=0.8), self.made("ewma")]
        self.members += [self.made(name) for name in names]
        self.members.append(self.made("cross-lift", ahead=2))
        if with_gate:
            self.members.insert(0, self.made("gate", with_gate=True))
        first = [1.0] + [0.0] * 7 if with_gate else [0.2] * 7
        self.dense = [[*first, 0.0] for _ in range(LAYERS)]
        self.dense_squares = [[START] * len(self.dense[0]) for _ in range(LAYERS)]
        self.table: dict[object, float] = defaultdict(float)
        self.squares: dict[object, float] = defaultdict(lambda: START)
        self.last: dict[int, list[int]] = defaultdict(list)

    @staticmethod
    def made(name: str, *, ahead: int = 1, **options: object) -> Predictor:
        kind = PREDICTORS.load(name)
        return kind(LAYERS, EXPERTS, TOP_K, ahead, **options)  # type: ignore[arg-type]

    def rows(self, layer: int, hints: Hints) -> dict[object, float]:
        rows: dict[object, float] = {"always": 1.0}
        rows |= {("source", e): 1.0 for e in self.last[(layer - 1) % LAYERS]}
        rows |= {("last", e): 1.0 for e in self.last[layer]}
        if len(self.members) == 8 and hints.gate:
            for rank, expert in enumerate(hints.gate[0]):
                rows["guessed", expert] = 2 * (1 - rank / len(hints.gate[0]))
        return rows

    def features(self, layer: int, hints: Hints) -> list[list[float]]:
        return [m.guess(layer, hints).tolist() for m in self.members] + [[1.0] * EXPERTS]

    def guess(self, layer: int, hints: Hints) -> list[float]:
        features, rows = self.features(layer, hints), self.rows(layer, hints)
        return [
            sum(w * f[e] for w, f in zip(self.dense[layer], features, strict=True))
            + sum(x * self.table[layer, row, e] for row, x in rows.items())
            for e in range(EXPERTS)
        ]

    def observe(self, layer: int, demand: list[int], hints: Hints) -> None:
        features, rows = self.features(layer, hints), self.rows(layer, hints)
        errors = [
            1 / (1 + math.exp(-z)) - (e in demand) for e, z in enumerate(self.guess(layer, hints))
        ]
        for m, feature in enumerate(features):
            slope = sum(f * error for f, error in zip(feature, errors, strict=True))
            self.dense_squares[layer][m] += slope**2
            self.dense[layer][m] -= RATE * slope / math.sqrt(self.dense_squares[layer][m])
        for row, x in rows.items():
            for e, error in enumerate(errors):
                self.squares[layer, row, e] += (x * error) ** 2
                self.table[layer, row, e] -= (
                    RATE * x * error / math.sqrt(self.squares[layer, row, e])
                )
        for member in self.members:
            member.observe(layer, demand, hints)
        self.last[layer] = demand


@pytest.mark.parametrize(
    ("num_layers", "ahead", "distances"),
    [(12, 1, [1, 2, 3, 4, 5]), (6, 4, [4, 5]), (2, 1, [1]), (3, 3, [3]), (1, 1, [1])],
)
def test_lifts_are_counted_from_five_calls_before(
    num_layers: int, ahead: int, distances: list[int]
) -> None:
    combined = PREDICTORS.load("combined")(num_layers, EXPERTS, TOP_K, ahead)
    found = [m.ahead for m in combined.members if m.name == "cross-lift"]  # type: ignore[attr-defined]
    assert found == distances


@pytest.mark.parametrize("with_gate", [True, False])
def test_the_combination_equals_its_formula(with_gate: bool) -> None:
    draw = random.Random(3)
    twin, combined = Twin(with_gate=with_gate), Twin.made("combined", with_gate=with_gate)
    for call in range(90):
        layer = call % LAYERS
        demand = sorted(draw.sample(range(EXPERTS), TOP_K))
        hints = Hints([draw.sample(range(EXPERTS), 4)] if layer else [])
        assert np.asarray(combined.guess(layer, hints)) == pytest.approx(
            twin.guess(layer, hints), abs=2e-3
        )
        combined.observe(layer, demand, hints)
        twin.observe(layer, demand, hints)
