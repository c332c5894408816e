"""What no policy can beat: Belady's choice, which knows the whole trace."""

from __future__ import annotations

from collections.abc import Sequence

from hotexperts.simulate.replay import Outcome, check_capacity
from hotexperts.simulate.schedule import LayerCall, Prefill, layer_calls, schedule
from hotexperts.simulate.trace import Trace
from hotexperts.stats import CacheStats


def belady(trace: Trace, capacity: int, batch: int = 1, prefill: Prefill = "warm") -> Outcome:
    """The hits of a cache that keeps the soonest-needed of residents and demand together.

    After each call the `capacity` experts stay whose next use comes first. A demanded expert may
    leave in the call that needs it, which no policy may do. No policy has more hits over all
    calls. With a prefill that is played, the hits of prefill are part of that optimum although
    they are not counted: over decode alone a cache that knew which calls count could do better.

    Arguments and errors are those of `replay`.
    """
    check_capacity(trace, capacity)
    steps = schedule(trace, batch, prefill)
    return Outcome(
        tuple(
            _bound_layer(list(layer_calls(trace, steps, layer)), capacity)
            for layer in range(trace.num_layers)
        )
    )


def _bound_layer(calls: Sequence[LayerCall], capacity: int) -> CacheStats:
    stats = CacheStats()
    resident: dict[int, int] = {}  # expert: the call that needs it next
    for call, next_uses in zip(calls, _next_uses(calls), strict=True):
        if call.counted:
            num_hits = sum(expert in resident for expert in call.demand)
            stats.calls += 1
            stats.hits += num_hits
            stats.misses += len(call.demand) - num_hits
        for expert in call.demand:
            resident.pop(expert, None)
        resident.update(next_uses)
        soonest = sorted(resident.items(), key=lambda item: (item[1], item[0]))[:capacity]
        resident = dict(soonest)
    return stats


def _next_uses(calls: Sequence[LayerCall]) -> list[dict[int, int]]:
    """For each call, the next call of each demanded expert that is used again."""
    next_use: dict[int, int] = {}
    found: list[dict[int, int]] = []
    for at in range(len(calls) - 1, -1, -1):
        found.append({e: next_use[e] for e in calls[at].demand if e in next_use})
        next_use.update(dict.fromkeys(calls[at].demand, at))
    return found[::-1]
