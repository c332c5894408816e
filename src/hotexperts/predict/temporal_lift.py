"""Temporal lift: naive Bayes on what the layer asked for a token ago."""

from __future__ import annotations

from hotexperts.predict.base import Ids
from hotexperts.predict.pairs import Lift


class TemporalLift(Lift):
    """How much more often than usual the experts follow the layer's last: see `Lift`, `Pairs`."""

    name = "temporal-lift"

    def origin(self, layer: int) -> Ids:
        """The layer's demand a token ago."""
        return self.last[layer]
