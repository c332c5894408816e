"""A trace played through a policy, layer by layer, without a model.

One event is one layer call with its distinct experts: hits are judged when it starts, and no
demanded expert leaves in it. Ties break by expert id, as everywhere (`hotexperts.policy.base`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hotexperts.errors import ConfigError
from hotexperts.policy import POLICIES, Policy
from hotexperts.residency import Residency
from hotexperts.simulate.schedule import LayerCall, Prefill, layer_calls, schedule
from hotexperts.simulate.trace import Trace
from hotexperts.stats import CacheStats, total


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay counted, over decode only.

    Attributes:
        layers: demands, hits and misses of each layer.
    """

    layers: tuple[CacheStats, ...]

    @property
    def total(self) -> CacheStats:
        """The sum over the layers."""
        return total(self.layers)


def replay(
    trace: Trace, policy: str, capacity: int, batch: int = 1, prefill: Prefill = "warm"
) -> Outcome:
    """Play a trace from a cold start.

    Args:
        trace: the recorded routing.
        policy: a registered name, or "module:Class".
        capacity: slots of each layer, 1 to its number of experts.
        batch: see `schedule`.
        prefill: see `schedule`.

    Raises:
        ConfigError: an argument out of range or an unknown policy.
    """
    check_capacity(trace, capacity)
    chosen = POLICIES.load(policy)
    steps = schedule(trace, batch, prefill)
    return Outcome(
        tuple(
            _replay_layer(layer_calls(trace, steps, layer), chosen(trace.num_experts, capacity))
            for layer in range(trace.num_layers)
        )
    )


def check_capacity(trace: Trace, capacity: int) -> None:
    """Refuse slots that no layer of the trace can have.

    Raises:
        ConfigError: below 1, or more than the layer has experts.
    """
    if not 1 <= capacity <= trace.num_experts:
        raise ConfigError(
            f"capacity {capacity}: a layer of the trace has {trace.num_experts} experts: "
            f"give 1 to {trace.num_experts}"
        )


def _replay_layer(calls: Iterable[LayerCall], policy: Policy) -> CacheStats:
    stats = CacheStats()
    ledger = Residency(policy.num_experts, policy.capacity)
    for call in calls:
        found = policy.decide(
            call.demand, call.counts, ledger.residents, ledger.num_free, evict=call.evict
        )
        ledger.apply(found)
        if call.counted:
            num_missed = len(found.admitted) + len(found.bypassed)
            stats.calls += 1
            stats.hits += len(call.demand) - num_missed
            stats.misses += num_missed
            stats.bypasses += len(found.bypassed)
            stats.evictions += len(found.victims)
    return stats
