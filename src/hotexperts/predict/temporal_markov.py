"""Temporal Markov: what a layer asks for after what it asked for a token ago."""

from __future__ import annotations

from hotexperts.predict.base import Ids
from hotexperts.predict.pairs import Markov


class TemporalMarkov(Markov):
    """The mean chance over the layer's own last experts: see `Markov`, `Pairs`."""

    name = "temporal-markov"

    def origin(self, layer: int) -> Ids:
        """The layer's demand a token ago."""
        return self.last[layer]
