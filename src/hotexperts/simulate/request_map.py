"""Request map: what the most similar earlier request asked for. In the simulator only."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from hotexperts.predict.base import Floats, Hints, Ids, to_log_odds
from hotexperts.predict.popularity import Popularity

MOST_MAPS = 256  # requests remembered; the oldest is forgotten
PRIOR = 2.0  # tokens' worth of belief in the popularity


class RequestMap(Popularity):
    """Matrices of requests, the idea of MoE-Infinity (arXiv 2401.14361).

    A request's matrix counts, for each layer and expert, the tokens so far that asked for it. Our
    reading of the lookup, once a token: of the finished requests the one whose matrix has the
    highest cosine with the matrix of the request that runs; then `p = (n_e + 2 p_e) / (n + 2)`,
    where n tokens of that request were counted, n_e of which asked for e, and p_e is the
    popularity. Before a request has ended, p is p_e. ExpertFlow's paths (arXiv 2410.17954) come
    from a trained model, which a trace cannot stand in for.
    """

    name = "request-map"
    needs: ClassVar[frozenset[str]] = frozenset({"requests"})

    def reset(self) -> None:
        """Forget every request."""
        super().reset()
        shape = self.num_layers, self.num_experts
        self.running = np.zeros(shape, np.float32)
        self.running_tokens = np.zeros(self.num_layers, np.float32)
        self.maps: list[tuple[Floats, Floats]] = []
        self.nearest: tuple[Floats, Floats] | None = None

    def begin(self) -> None:
        """Store the request that ran, and forget what it looked like."""
        if self.running_tokens.any():
            self.maps = [*self.maps, (self.running, self.running_tokens)][-MOST_MAPS:]
        self.running = np.zeros_like(self.running)
        self.running_tokens = np.zeros_like(self.running_tokens)
        self.nearest = None

    def log_odds(self, layer: int, hints: Hints) -> Floats:
        """See the class."""
        chance = self.chance(layer)
        if self.nearest is None:
            return to_log_odds(chance)
        matrix, tokens = self.nearest
        return to_log_odds((matrix[layer] + PRIOR * chance) / (tokens[layer] + PRIOR))

    def learn(self, layer: int, demand: Ids, hints: Hints) -> None:
        """Count; after a token's last layer look the nearest request up."""
        super().learn(layer, demand, hints)
        self.running[layer, demand] += 1
        self.running_tokens[layer] += 1
        if layer == self.num_layers - 1 and self.maps:
            self.nearest = max(self.maps, key=lambda stored: _cosine(stored[0], self.running))


def _cosine(one: Floats, other: Floats) -> float:
    return float(np.vdot(one, other) / (np.linalg.norm(one) * np.linalg.norm(other)))
