"""A trace played through a policy, without a model.

One event is one layer call with its distinct experts: hits are judged when it starts, and no
demanded expert leaves in it. Ties break by expert id, as everywhere (`hotexperts.policy.base`),
unless the rules say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotexperts.policy import Policy
from hotexperts.residency import Residency
from hotexperts.simulate.players import player
from hotexperts.simulate.rules import ENGINE, Rules
from hotexperts.simulate.schedule import LayerCall, Prefill, schedule
from hotexperts.simulate.streams import streams
from hotexperts.simulate.trace import Trace
from hotexperts.stats import CacheStats, total
from hotexperts.types import Decision


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay counted, over decode only.

    Attributes:
        layers: demands, hits and misses of each layer, whatever slots it shares with others.
    """

    layers: tuple[CacheStats, ...]

    @property
    def total(self) -> CacheStats:
        """The sum over the layers."""
        return total(self.layers)


def replay(
    trace: Trace,
    policy: str,
    capacity: int,
    batch: int = 1,
    prefill: Prefill = "warm",
    rules: Rules = ENGINE,
) -> Outcome:
    """Play a trace from a cold start.

    Args:
        trace: the recorded routing.
        policy: a registered name, or "module:Class"; in a global pool one of `POOLED`.
        capacity: slots of each layer, 1 to its number of experts; the mean where layers share.
        batch: see `schedule`.
        prefill: see `schedule`.
        rules: see `Rules`.

    Raises:
        ConfigError: an argument out of range, an unknown policy, or one that cannot follow the
            rules.
    """
    layers = [CacheStats() for _ in range(trace.num_layers)]
    for call, found in _counted(trace, policy, capacity, batch, prefill, rules):
        stats, num_missed = layers[call.layer], _num_missed(found)
        stats.calls += 1
        stats.hits += len(call.demand) - num_missed
        stats.misses += num_missed
        stats.bypasses += len(found.bypassed)
        stats.evictions += len(found.victims)
    return Outcome(tuple(layers))


def misses_by_step(
    trace: Trace,
    policy: str,
    capacity: int,
    batch: int = 1,
    prefill: Prefill = "warm",
    rules: Rules = ENGINE,
) -> npt.NDArray[np.int64]:
    """When the same replay misses: `[step, layer]`, over decode only.

    Arguments and errors are those of `replay`, whose counts are the sums over the steps.
    """
    num_steps = sum(step.counted for step in schedule(trace, batch, prefill))
    misses = np.zeros((num_steps, trace.num_layers), np.int64)
    for call, found in _counted(trace, policy, capacity, batch, prefill, rules):
        misses[call.step, call.layer] += _num_missed(found)
    return misses


def _counted(
    trace: Trace, policy: str, capacity: int, batch: int, prefill: Prefill, rules: Rules
) -> Iterator[tuple[LayerCall, Decision]]:
    """Every counted call of a replay, with what was decided."""
    create = player(policy, trace.num_layers, rules)
    for stream in streams(trace, capacity, batch, prefill, rules):
        for calls in stream.runs:
            yield from _play(calls, create(stream.num_experts, stream.num_slots))


def _play(calls: Iterable[LayerCall], policy: Policy) -> Iterator[tuple[LayerCall, Decision]]:
    ledger = Residency(policy.num_experts, policy.capacity)
    for call in calls:
        found = policy.decide(
            call.demand, call.counts, ledger.residents, ledger.num_free, evict=call.evict
        )
        ledger.apply(found)
        if call.counted:
            yield call, found


def _num_missed(found: Decision) -> int:
    return len(found.admitted) + len(found.bypassed)
