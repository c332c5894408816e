"""Logistic regression that learns as it goes: dense features, and rows of a table."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from hotexperts.predict.base import Floats, Ids

START = np.float32(1e-3)  # of the sums of squares: the first step is not a leap
Rows: TypeAlias = tuple[Ids, Floats]


class Dense:
    """Weights of a few features that all experts share, one set a layer.

    `z = w . x`, then AdaGrad on the log loss summed over experts: `g = (p - used) . x`,
    `G = G + g^2`, `w = w - rate g / sqrt(G)`. float32.
    """

    def __init__(self, num_layers: int, weights: list[float], rate: float) -> None:
        self.weight = np.tile(np.array(weights, np.float32), (num_layers, 1))
        self.squares = np.full_like(self.weight, START)
        self.rate = np.float32(rate)

    def apply(self, layer: int, features: Floats) -> Floats:
        """Z of every expert from features `[feature, expert]`."""
        found: Floats = self.weight[layer] @ features
        return found

    def learn(self, layer: int, features: Floats, error: Floats) -> None:
        """One step; error is p less 1 for each expert that was used."""
        slope = features @ error
        self.squares[layer] += slope * slope
        self.weight[layer] -= self.rate * slope / np.sqrt(self.squares[layer])


class Table:
    """A row of weights to every expert for each thing that may be the case, a table a layer.

    `z_e = sum over rows r of x_r W_re`, AdaGrad in every weight of a row that was the case.
    """

    def __init__(self, num_layers: int, num_rows: int, num_experts: int, rate: float) -> None:
        self.weight = np.zeros((num_layers, num_rows, num_experts), np.float32)
        self.squares = np.full_like(self.weight, START)
        self.rate = np.float32(rate)

    def apply(self, layer: int, rows: Rows) -> Floats:
        """Z of every expert; rows are numbers, each once, and x of each."""
        which, value = rows
        found: Floats = value @ self.weight[layer, which]
        return found

    def learn(self, layer: int, rows: Rows, error: Floats) -> None:
        """One step; see `Dense.learn`."""
        which, value = rows
        slope = value[:, None] * error
        squares = self.squares[layer, which] + slope * slope
        self.squares[layer, which] = squares
        self.weight[layer, which] -= self.rate * slope / np.sqrt(squares)
