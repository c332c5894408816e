"""Which calls reach which slots: a cache a layer, or one for all of them, and what it begins with.

In a global pool expert e of layer l has the id `l * num_experts + e`, so that whatever plays one
layer plays the pool too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hotexperts.errors import ConfigError
from hotexperts.simulate.rules import PROMPTS, Rules
from hotexperts.simulate.schedule import (
    LayerCall,
    Prefill,
    Step,
    cut_at_ends,
    layer_calls,
    schedule,
)
from hotexperts.simulate.split import split_slots
from hotexperts.simulate.trace import NOT_RECORDED, PREFILL, Trace


@dataclass(frozen=True, slots=True)
class Stream:
    """What one set of slots is asked for.

    Attributes:
        runs: the calls after each cold start, in order; a preload is the first one of its run.
        num_experts: ids in the calls are 0 to num_experts - 1.
        num_slots: 1 to num_experts.
    """

    runs: list[list[LayerCall]]
    num_experts: int
    num_slots: int


def streams(
    trace: Trace, capacity: int, batch: int, prefill: Prefill, rules: Rules
) -> list[Stream]:
    """The streams of a replay: one a layer, or a single one for a global pool.

    Arguments are those of `replay`.

    Raises:
        ConfigError: an argument out of range, or a preload that the trace cannot have.
    """
    check_capacity(trace, capacity, rules)
    heat = preload_uses(trace, rules)
    steps = schedule(trace, batch, prefill)
    runs = cut_at_ends(trace, steps) if rules.sequences == "cold" else [steps]
    if rules.pool == "global":
        return [_pooled(trace, runs, capacity, rules, heat)]
    num_slots = [capacity] * trace.num_layers
    if rules.pool == "split":
        num_slots = split_slots(trace, steps, capacity, rules.ties)
    return [
        Stream(
            [
                [*preload_calls(heat[layer], slots, rules), *_calls(trace, run, rules, layer)]
                for run in runs
            ],
            trace.num_experts,
            slots,
        )
        for layer, slots in enumerate(num_slots)
    ]


def check_capacity(trace: Trace, capacity: int, rules: Rules) -> None:
    """Refuse slots that no layer of the trace can have.

    Raises:
        ConfigError: below 1, more than the layer has experts, or fewer than the pool's floor.
    """
    if not 1 <= capacity <= trace.num_experts:
        raise ConfigError(
            f"capacity {capacity}: a layer of the trace has {trace.num_experts} experts: "
            f"give 1 to {trace.num_experts}"
        )
    if rules.pool_floor > capacity:
        raise ConfigError(
            f"pool floor {rules.pool_floor}: the pool has {capacity} slots a layer: give a floor "
            f"of at most {capacity}, or more slots"
        )


def preload_uses(trace: Trace, rules: Rules) -> npt.NDArray[np.int64]:
    """How often the preload's tokens ask for each expert, `[layer, expert]`; 0 without a preload.

    Raises:
        ConfigError: a preload from prompts that are not there, or from another model.
    """
    shape = trace.num_layers, trace.num_experts
    if rules.preload is None:
        return np.zeros(shape, np.int64)
    if isinstance(rules.preload, Trace):
        profile, ids = rules.preload, rules.preload.ids
        if (profile.num_layers, profile.num_experts) != shape:
            raise ConfigError(
                f"the preload's trace has {profile.num_layers} layers of {profile.num_experts} "
                f"experts, the replayed one {shape[0]} of {shape[1]}: preload from the same model"
            )
    else:
        ids = trace.ids[trace.phase == PREFILL]
        if not (ids != NOT_RECORDED).any():
            raise ConfigError(
                f"preload {PROMPTS!r}: the trace has no prefill: preload from another trace"
            )
    return np.stack([np.bincount(row[row >= 0], minlength=shape[1]) for row in ids.swapaxes(0, 1)])


def _calls(trace: Trace, run: list[Step], rules: Rules, *layers: int) -> Sequence[LayerCall]:
    return list(layer_calls(trace, run, *layers, ties=rules.ties))


def _pooled(
    trace: Trace,
    runs: list[list[Step]],
    capacity: int,
    rules: Rules,
    heat: npt.NDArray[np.int64],
) -> Stream:
    num_layers, num_experts = heat.shape
    num_slots = capacity * num_layers
    calls = [
        [
            replace(call, demand=[call.layer * num_experts + expert for expert in call.demand])
            for call in _calls(trace, run, rules, *range(num_layers))
        ]
        for run in runs
    ]
    first = preload_calls(heat.reshape(-1), num_slots, rules)
    return Stream([[*first, *run] for run in calls], heat.size, num_slots)


def preload_calls(heat: npt.NDArray[np.int64], num_slots: int, rules: Rules) -> list[LayerCall]:
    """A call, as a prefill makes it, for the hottest; of equal heat the lower id is in."""
    hottest = np.argsort(-heat, kind="stable")[:num_slots]
    hottest = hottest[heat[hottest] > 0]
    if rules.ties == "id":
        hottest = np.sort(hottest)
    if not len(hottest):
        return []
    return [LayerCall(hottest.tolist(), heat[hottest].tolist(), counted=False, evict=False)]
