"""What no policy can beat: caches that know the whole trace, or that never evict.

Experts are ranked by all their later uses: the next one, then the one after it, and so on. Where a
demanded resident may not leave, the second use matters: it is held in the call of the first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

from hotexperts.errors import UnknownNameError
from hotexperts.simulate.replay import Outcome
from hotexperts.simulate.rules import ENGINE, Rules
from hotexperts.simulate.schedule import LayerCall, Prefill
from hotexperts.simulate.streams import streams
from hotexperts.simulate.trace import Trace
from hotexperts.stats import CacheStats

Need = tuple[int, int]  # the call that needs an expert next, and its place there by later uses
NextUse = Mapping[int, Need]
Keep = Callable[[set[int], LayerCall, NextUse, int], set[int]]


def bound(
    name: str,
    trace: Trace,
    capacity: int,
    batch: int = 1,
    prefill: Prefill = "warm",
    rules: Rules = ENGINE,
) -> Outcome:
    """The hits of the bound called `name`, one of `BOUNDS`.

    Bounds know no floor of a pool, and ties matter only among experts of no more use.

    The other arguments and the errors are those of `replay`.

    Raises:
        UnknownNameError: no such bound.
    """
    if name not in BOUNDS:
        raise UnknownNameError(f"unknown bound {name!r}: choose one of {', '.join(BOUNDS)}")
    layers = [CacheStats() for _ in range(trace.num_layers)]
    for stream in streams(trace, capacity, batch, prefill, rules):
        for calls in stream.runs:
            _play(calls, stream.num_slots, BOUNDS[name], layers)
    return Outcome(tuple(layers))


def belady(
    trace: Trace,
    capacity: int,
    batch: int = 1,
    prefill: Prefill = "warm",
    rules: Rules = ENGINE,
) -> Outcome:
    """The hits of a cache that keeps the soonest-needed of residents and demand together.

    After each call the `capacity` experts stay whose next use comes first. A demanded expert may
    leave in the call that needs it, which no policy may do. No policy has more hits over all
    calls. With a prefill that is played, the hits of prefill are part of that optimum although
    they are not counted: over decode alone a cache that knew which calls count could do better.

    Arguments and errors are those of `replay`.
    """
    return bound("belady", trace, capacity, batch, prefill, rules)


def _play(
    calls: Sequence[LayerCall], num_slots: int, keep: Keep, layers: Sequence[CacheStats]
) -> None:
    resident: set[int] = set()
    next_use: dict[int, Need] = {}
    for call, next_uses in zip(calls, _next_uses(calls), strict=True):
        if call.counted:
            num_hits = sum(expert in resident for expert in call.demand)
            layers[call.layer].calls += 1
            layers[call.layer].hits += num_hits
            layers[call.layer].misses += len(call.demand) - num_hits
        next_use.update(next_uses)
        resident = keep(resident, call, next_use, num_slots)


def _next_uses(calls: Sequence[LayerCall]) -> list[dict[int, Need]]:
    """For each call, when each of its experts is needed next; past the last call if never."""
    never = len(calls), 0
    next_use: dict[int, Need] = {}
    found: list[dict[int, Need]] = []
    for at in range(len(calls) - 1, -1, -1):
        found.append({expert: next_use.get(expert, never) for expert in calls[at].demand})
        soonest_first = sorted(calls[at].demand, key=lambda expert: found[-1][expert])
        next_use.update({expert: (at, place) for place, expert in enumerate(soonest_first)})
    return found[::-1]


def _keep_soonest(
    resident: set[int], call: LayerCall, next_use: NextUse, num_slots: int
) -> set[int]:
    """Belady's choice among residents and demand together."""
    return _soonest(resident.union(call.demand), next_use, num_slots)


def _keep_atomic(
    resident: set[int], call: LayerCall, next_use: NextUse, num_slots: int
) -> set[int]:
    """The same under the engine's rule: a demanded resident stays, a miss may pass by.

    A call that may not evict keeps all residents.
    """
    held = resident.intersection(call.demand) if call.evict else set(resident)
    others = resident.union(call.demand) - held
    return held | _soonest(others, next_use, num_slots - len(held))


def _keep_forced(
    resident: set[int], call: LayerCall, next_use: NextUse, num_slots: int
) -> set[int]:
    """A demanded resident stays, and every miss enters that finds a place, the soonest first."""
    held = resident.intersection(call.demand) if call.evict else set(resident)
    held |= _soonest(set(call.demand) - held, next_use, num_slots - len(held))
    return held | _soonest(resident - held, next_use, num_slots - len(held))


def _keep_all(resident: set[int], call: LayerCall, next_use: NextUse, num_slots: int) -> set[int]:
    """A slot for every expert: only first touches miss."""
    return resident.union(call.demand)


def _soonest(experts: Iterable[int], next_use: NextUse, most: int) -> set[int]:
    """The `most` experts that are needed soonest; of equals the lower id stays."""
    found = set(experts)
    surplus = len(found) - most
    if surplus <= 0:
        return found
    latest = heapq.nlargest(surplus, found, key=lambda expert: (next_use[expert], expert))
    return found.difference(latest)


BOUNDS: dict[str, Keep] = {
    "belady": _keep_soonest,
    "belady-atomic": _keep_atomic,
    "belady-forced": _keep_forced,
    "infinite": _keep_all,
}
