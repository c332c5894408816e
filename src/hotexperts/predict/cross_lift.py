"""Cross-layer lift: naive Bayes on what an earlier layer asked for."""

from __future__ import annotations

from hotexperts.predict.pairs import Lift


class CrossLift(Lift):
    """How much more often than usual the experts follow the source layer's: see `Lift`, `Pairs`."""

    name = "cross-lift"
