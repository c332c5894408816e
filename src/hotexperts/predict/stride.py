"""Stride: a learned predictor that looks two layers ahead."""

from __future__ import annotations

from hotexperts.predict.base import Ids
from hotexperts.predict.logistic import Logistic

STRIDE = 2


class Stride(Logistic):
    """Predicts over a stride of two layers, in the manner of ProMoE (arXiv 2410.22134).

    ProMoE trains a perceptron for each layer ahead of time, on hidden states, and starts transfers
    a stride of layers early. Our reading has ids only and no training set: `Logistic` from the
    demand two layers back at least, whatever `ahead` is. It claims nothing about the paper's
    figures.
    """

    name = "stride"

    def source(self, layer: int) -> Ids:
        """The demand two calls before, or `ahead` if that is more."""
        return self.last[(layer - max(STRIDE, self.ahead)) % self.num_layers]
