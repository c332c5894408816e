"""Cross-layer Markov: what a layer asks for after what an earlier layer asked for."""

from __future__ import annotations

from hotexperts.predict.pairs import Markov


class CrossMarkov(Markov):
    """The mean chance over the source layer's experts, of the same token: see `Markov`, `Pairs`."""

    name = "cross-markov"
