"""The contract of a predictor: before a layer is called, how likely is each expert's demand?

A model's layers are called in a circle, token after token. The call of layer l is foretold from
its source, the call `ahead` before it: layer l - ahead of the same token or, for the first layers,
one of the last layers of the token before. When a guess is made, the source's demand is known, and
so is what the target layer was asked for a token ago; nothing later is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Ids: TypeAlias = npt.NDArray[np.intp]
NOBODY: Ids = np.zeros(0, np.intp)


@dataclass(frozen=True, slots=True)
class Hints:
    """What is known of one call beside the calls before it.

    Attributes:
        gate: of each token of the call, the experts that the target layer's router ranks highest
            on an earlier hidden state, the highest first.
        truth: the call's demand, for a predictor that knows the future.
    """

    gate: Sequence[Sequence[int]] = ()
    truth: Sequence[int] = ()


NO_HINTS = Hints()


class Predictor(ABC):
    """One model's predictor, learning as it goes: there is no training set.

    `guess` changes nothing and may be left out; `observe` comes once a call, in the order of the
    calls. In a batch the demand is the union over its tokens.

    Attributes:
        name: in the registry.
        needs: what the hints must hold, of "gate" and "truth"; "requests" for one that must be
            told where a sequence begins, and so serves one at a time.

    Args:
        num_layers: layers, called in a circle.
        num_experts: experts in each; ids are 0 to num_experts - 1.
        top_k: experts that a token asks for, which is where chances start from.
        ahead: calls between source and target, 1 to num_layers.
        with_gate: whether the hints hold the router's guesses.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        ahead: int = 1,
        *,
        with_gate: bool = False,
    ) -> None:
        assert 1 <= ahead <= num_layers, (ahead, num_layers)
        assert with_gate or "gate" not in self.needs, self.name
        self.num_layers, self.num_experts, self.top_k = num_layers, num_experts, top_k
        self.ahead, self.with_gate = ahead, with_gate
        self.base = min(0.5, top_k / num_experts)  # chance of an expert of which nothing is known
        self.reset()

    def reset(self) -> None:
        """Forget everything, as if just constructed."""
        self.last: list[Ids] = [NOBODY] * self.num_layers

    def begin(self) -> None:  # noqa: B027
        """A sequence begins; what was learned stays."""

    def guess(self, layer: int, hints: Hints = NO_HINTS) -> Floats:
        """Log-odds of every expert's demand in the next call of a layer, `[num_experts]`.

        Changes nothing that a later guess depends on.
        """
        return self.log_odds(layer, hints)

    def observe(self, layer: int, demand: Sequence[int] | Ids, hints: Hints = NO_HINTS) -> None:
        """Learn from what a call asked for: distinct experts, and the hints that it had."""
        found = np.asarray(demand, np.intp)
        self.learn(layer, found, hints)
        self.last[layer] = found

    def source(self, layer: int) -> Ids:
        """The demand that a layer's next call is foretold from; empty before there is one."""
        return self.last[(layer - self.ahead) % self.num_layers]

    @abstractmethod
    def log_odds(self, layer: int, hints: Hints) -> Floats:
        """See `guess`."""

    @abstractmethod
    def learn(self, layer: int, demand: Ids, hints: Hints) -> None:
        """Update from one call; `last` still holds the calls before it."""

    def uses(self, demand: Ids) -> Floats:
        """1 for each demanded expert, 0 for the others."""
        found = np.zeros(self.num_experts, np.float32)
        found[demand] = 1
        return found


MOST_LOG_ODDS = 12.0


def to_log_odds(chance: Floats) -> Floats:
    """log(p / (1 - p)), cut off at -12 and 12."""
    with np.errstate(divide="ignore"):
        found: Floats = np.log(chance) - np.log1p(-chance)
    return cut(found)


def to_chance(log_odds: Floats) -> Floats:
    """1 / (1 + exp(-z)) of log-odds from -12 to 12."""
    found: Floats = np.float32(1) / (np.float32(1) + np.exp(-cut(log_odds)))
    return found


def cut(log_odds: Floats) -> Floats:
    """Log-odds from -12 to 12: no count is enough to be surer."""
    most = np.float32(MOST_LOG_ODDS)
    found: Floats = np.minimum(np.maximum(log_odds, -most), most)
    return found
