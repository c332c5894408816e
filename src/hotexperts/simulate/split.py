"""Slots shared out between layers by what the first part of a trace makes of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hotexperts.simulate.rules import Ties
from hotexperts.simulate.schedule import LayerCall, Step, layer_calls
from hotexperts.simulate.trace import Trace

PROFILED_SHARE = 2  # the first one in so many steps decides
Hits = npt.NDArray[np.int64]


def split_slots(trace: Trace, steps: list[Step], capacity: int, ties: Ties = "id") -> list[int]:
    """A miss-rate-constrained split: slots go where the next one saves most misses.

    Our reading of the miss-rate constraint of SliceMoE (arXiv 2512.12990) for whole experts: the
    total is fixed, `capacity` a layer, and each layer gets 1 slot or more so that an LRU a layer
    would have the most hits in the first half of the steps, counted or not. At that optimum no
    slot gains more hits in another layer: the marginal gains are as equal as whole slots allow.
    Of equal splits the most even one is taken.

    Args:
        trace: the recorded routing.
        steps: from `schedule`.
        capacity: mean slots of a layer, 1 to its number of experts.
        ties: see `Rules`.

    Returns:
        Slots of each layer; they sum up to `capacity` times the layers.
    """
    profiled = steps[: -(-len(steps) // PROFILED_SHARE)]
    hits = np.stack(
        [
            lru_hits_by_slots(
                layer_calls(trace, profiled, layer, ties=ties), trace.num_experts, ties
            )
            for layer in range(trace.num_layers)
        ]
    )
    return best_split(hits, capacity)


def lru_hits_by_slots(calls: Iterable[LayerCall], num_experts: int, ties: Ties = "id") -> Hits:
    """LRU's hits with n slots at `[n]`, n = 0 to num_experts, in one pass.

    An expert hits where the cache is larger than its depth in the stack of the last uses (Mattson
    et al., IBM Systems Journal 9(2), 1970). Exact for every n that holds the largest demand;
    below, LRU lets misses pass by, and this is an estimate.
    """
    num_at_depth = np.zeros(num_experts, np.int64)
    stack: list[int] = []  # last used first
    for call in calls:
        places = [stack.index(expert) for expert in call.demand if expert in stack]
        np.add.at(num_at_depth, places, 1)
        demanded = frozenset(call.demand)
        newest = call.demand if ties == "listed" else call.demand[::-1]  # a lower id is older
        stack = newest + [expert for expert in stack if expert not in demanded]
    return np.concatenate([[0], np.cumsum(num_at_depth)])


def best_split(hits: Hits, capacity: int) -> list[int]:
    """The split with the most hits, by dynamic programming over layers.

    Args:
        hits: `[layer, slots]`, from 0 slots to all experts.
        capacity: mean slots of a layer.

    Returns:
        Slots of each layer, 1 or more.
    """
    num_layers, num_sizes = hits.shape
    num_total = capacity * num_layers
    unevenness = (np.arange(num_sizes) - capacity) ** 2
    value = hits * (num_layers * num_sizes**2) - unevenness  # hits first, evenness among equals
    nothing = np.iinfo(np.int64).min // 2
    best = np.full(num_total + 1, nothing)
    best[0] = 0
    chosen = np.zeros((num_layers, num_total + 1), np.int64)
    for layer in range(num_layers):
        before, best = best, np.full(num_total + 1, nothing)
        for slots in range(1, min(num_sizes - 1, num_total) + 1):
            with_these = before[: num_total + 1 - slots] + value[layer, slots]
            better = np.flatnonzero(with_these > best[slots:]) + slots
            best[better] = with_these[better - slots]
            chosen[layer, better] = slots
    return _followed_back(chosen)


def _followed_back(chosen: Hits) -> list[int]:
    """Each layer's slots from `chosen[layer, total slots of the layers up to it]`."""
    found: list[int] = []
    left = chosen.shape[1] - 1
    for slots_by_total in chosen[::-1]:
        found.append(int(slots_by_total[left]))
        left -= found[-1]
    return found[::-1]
