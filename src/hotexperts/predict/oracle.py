"""Oracle: knows the demand, for bounds."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from hotexperts.predict.base import MOST_LOG_ODDS, Floats, Hints, Ids, Predictor


class Oracle(Predictor):
    """12 for what the call will ask for, -12 for the rest; no engine has it."""

    name = "oracle"
    needs: ClassVar[frozenset[str]] = frozenset({"truth"})

    def log_odds(self, layer: int, hints: Hints) -> Floats:
        """See the class."""
        found = np.full(self.num_experts, -MOST_LOG_ODDS, np.float32)
        found[list(hints.truth)] = MOST_LOG_ODDS
        return found

    def learn(self, layer: int, demand: Ids, hints: Hints) -> None:
        """There is nothing left to learn."""
