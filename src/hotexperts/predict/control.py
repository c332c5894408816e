"""How much to prefetch: a threshold that waste raises, a budget, and a switch a layer.

The engine runs the same on the device; this class is its specification.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hotexperts.errors import ConfigError

WASTE_PRICE = 0.1  # what a wasted transfer costs, where a used one is worth 1
LEAST_THRESHOLD = WASTE_PRICE / (1 + WASTE_PRICE)  # where a guess is worth nothing
MOST_THRESHOLD = 0.95  # without any credit
GAIN = 0.1  # log-odds that one expert of credit lowers the threshold by
MEMORY = 64  # calls over which a layer's payoff is averaged, and that a trial lasts
FIRST_PAYOFF, OFF_BELOW, ON_ABOVE = 0.5, 0.02, 0.05  # worth of a call
FIRST_REST, MOST_REST = 256, 4096  # calls that a layer is off before it is tried again


@dataclass(slots=True)
class Layer:
    """One layer's counters, and whether it prefetches.

    Attributes:
        issued: experts transferred on a guess.
        used: of these, demanded by the call they were for.
        late: of these, not yet there when the call began.
        wasted: issued and not demanded.
        is_on: whether guesses are made at all.
        payoff: average worth of a call.
        trial: calls that a trial still lasts; 0 outside of one.
        rest: calls until the next trial, while off.
        next_rest: how long the layer rests if it is switched off next.
    """

    issued: int = 0
    used: int = 0
    late: int = 0
    wasted: int = 0
    is_on: bool = True
    payoff: float = FIRST_PAYOFF
    trial: int = 0
    rest: int = 0
    next_rest: int = FIRST_REST


class Control:
    """Decides which guesses are transferred, and learns from what they were good for.

    **Credit.** `credit = (ratio - 1) * misses - wasted - outstanding`, in experts, over all layers:
    a miss is a demanded expert that the cache did not hold, prefetched or not; outstanding is what
    was transferred for calls to come. Without prefetch the misses are all that is transferred, so
    as no guess is made that credit does not cover, bytes never exceed `ratio` times those. The
    threshold follows the credit: `logit(threshold) = logit(.95) - .1 * credit`, at least 1/11,
    where by the price below a guess is worth nothing. So waste raises it, and it settles where the
    budget is used up but for a few dozen experts.

    **Slack.** Of a transfer the part h (0 to 1) that is hidden is what a right guess saves, and the
    rest is what a wrong one costs: it pays if p > 1 - h. So the n-th guess of a call needs
    `p >= max(threshold, 1 - h_n)`.

    **Switch.** `payoff = payoff + (used - .1 * wasted - payoff) / 64` after each call of the layer.
    Below .02 the layer is switched off. It rests 256 calls, then is tried for 64, starting at .05:
    if the payoff ends at .05 or more it is on, else, or if it falls below .02 before, it rests
    twice as long as the last time, 4096 calls at most.

    Args:
        num_layers: layers.
        max_guesses: experts transferred for one call at most: staging rows, and what a budget of
            bytes a call holds.
        ratio: bytes with prefetch over bytes without, 1 or more; None: no such budget, and the
            threshold stays at 1/11.

    Raises:
        ConfigError: a number below 1.
    """

    def __init__(self, num_layers: int, max_guesses: int, ratio: float | None = 1.5) -> None:
        if max_guesses < 1:
            raise ConfigError(f"at most {max_guesses} guesses a call: give 1 or more")
        if ratio is not None and not 1 <= ratio < math.inf:
            raise ConfigError(f"{ratio:g} times the bytes: give 1 or more, for example 1.5")
        self.max_guesses, self.ratio = max_guesses, ratio
        self.credit = 0.0
        self.layers = [Layer() for _ in range(num_layers)]

    @property
    def threshold(self) -> float:
        """The least chance that a guess needs now."""
        if self.ratio is None:
            return LEAST_THRESHOLD
        odds = MOST_THRESHOLD / (1 - MOST_THRESHOLD) * math.exp(-GAIN * max(self.credit, 0.0))
        return max(odds / (1 + odds), LEAST_THRESHOLD)

    def choose(
        self, layer: int, candidates: Sequence[tuple[int, float]], hidden: Sequence[float] = ()
    ) -> list[int]:
        """The experts to transfer for a layer's next call; their credit is spent.

        Args:
            layer: whose call; one that is off gets none.
            candidates: experts that are not resident and the chance of each.
            hidden: of the first, second, ... transfer the part that is hidden; after the last one
                nothing is. Empty: all of every transfer.

        Returns:
            The likeliest first, of equals the lower id.
        """
        if not self.layers[layer].is_on:
            return []
        threshold, most = self.threshold, self.max_guesses
        if self.ratio is not None:
            most = min(most, max(0, math.floor(self.credit)))
        likeliest = sorted((item for item in candidates if item[1] >= threshold), key=_likeliest)
        chosen: list[int] = []
        for expert, chance in likeliest[:most]:
            if hidden and chance < 1 - (hidden[len(chosen)] if len(chosen) < len(hidden) else 0):
                break
            chosen.append(expert)
        if self.ratio is not None:
            self.credit -= len(chosen)
        return chosen

    def record(self, layer: int, num_missed: int, issued: int, used: int, late: int = 0) -> None:
        """What one call missed and made of its guesses; every call is recorded, also while off.

        Args:
            layer: whose call it was.
            num_missed: demanded experts that the cache did not hold.
            issued: guesses that were transferred for it.
            used: of these, demanded.
            late: of these, waited for.
        """
        state, wasted = self.layers[layer], issued - used
        state.issued += issued
        state.used += used
        state.late += late
        state.wasted += wasted
        if self.ratio is not None:
            self.credit += (self.ratio - 1) * num_missed + used
        if state.is_on:
            state.payoff += (used - WASTE_PRICE * wasted - state.payoff) / MEMORY
            _judge(state)
        else:
            _rest(state)


def _likeliest(candidate: tuple[int, float]) -> tuple[float, int]:
    return -candidate[1], candidate[0]


def _judge(state: Layer) -> None:
    """Switch off what does not pay; a trial that ends well switches on for good."""
    ends = state.trial == 1
    state.trial = max(0, state.trial - 1)
    if state.payoff < (ON_ABOVE if ends else OFF_BELOW):
        state.is_on, state.trial, state.rest = False, 0, state.next_rest
        state.next_rest = min(2 * state.next_rest, MOST_REST)
    elif ends:
        state.next_rest = FIRST_REST


def _rest(state: Layer) -> None:
    state.rest -= 1
    if state.rest == 0:
        state.is_on, state.trial, state.payoff = True, MEMORY, ON_ABOVE
