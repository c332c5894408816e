"""In which order the tokens of a trace reach the cache: lanes of a batch, prefill and decode."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal, get_args

from hotexperts.errors import ConfigError
from hotexperts.simulate.rules import Ties
from hotexperts.simulate.trace import DECODE, NOT_RECORDED, PREFILL, Trace

Prefill = Literal["warm", "seed", "ignore"]


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens that pass through the model together.

    Attributes:
        tokens: their rows in the trace.
        counted: decode; prefill is played and not counted.
        evict: False takes free slots only.
        number: of the counted steps, from 0 on; 0 in others.
    """

    tokens: list[int]
    counted: bool
    evict: bool
    number: int = 0


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What one layer is asked for in one step; see `Step` and `hotexperts.types.Event`.

    Attributes:
        demand: distinct experts; in ascending id or as first listed, lane after lane.
        counts: tokens routed to each of them, same order.
        counted: see `Step`.
        evict: see `Step`.
        layer: whose call it is.
        step: see `Step.number`.
    """

    demand: list[int]
    counts: list[int]
    counted: bool
    evict: bool
    layer: int = 0
    step: int = 0


def schedule(trace: Trace, batch: int, prefill: Prefill) -> list[Step]:
    """The steps of a batch of lanes; a lane whose sequence ends takes the next unused one.

    A prefill comes when its lane reaches it, before the decode step that follows it. The steps
    end when a lane finds no further sequence, so that every batch is full.

    Args:
        trace: the recorded routing.
        batch: lanes, 1 to the number of sequences.
        prefill: "warm" plays it token by token, "seed" at once into free slots only, "ignore"
            not at all.

    Raises:
        ConfigError: an argument out of range, or a trace without decode.
    """
    _check(trace, batch, prefill)
    unused = deque(trace.sequences())
    phase = trace.phase.tolist()
    steps: list[Step] = []
    lanes: list[deque[int]] = [deque() for _ in range(batch)]
    number = 0
    while True:
        found = [_next_decode(lane, unused, phase, prefill, steps) for lane in lanes]
        tokens = [token for token in found if token is not None]
        if len(tokens) < batch:
            return steps
        steps.append(Step(tokens, counted=True, evict=True, number=number))
        number += 1


def layer_calls(
    trace: Trace, steps: list[Step], *layers: int, ties: Ties = "id"
) -> Iterator[LayerCall]:
    """Calls in order, step by step and layer by layer.

    A step of which a layer has no record calls it not at all.

    Args:
        trace: the recorded routing.
        steps: from `schedule`.
        layers: whose calls, ascending.
        ties: "listed" keeps the router's order in the demand.
    """
    # Rows of these steps alone: callers that come step by step would turn the trace to lists anew.
    tokens_used = sorted({token for step in steps for token in step.tokens})
    place = {token: at for at, token in enumerate(tokens_used)}
    rows_of = {layer: trace.ids[tokens_used, layer].tolist() for layer in layers}
    for step in steps:
        for layer, rows in rows_of.items():
            counts = Counter(chain.from_iterable([rows[place[token]] for token in step.tokens]))
            del counts[NOT_RECORDED]
            demand = list(counts) if ties == "listed" else sorted(counts)
            if demand:
                tokens = [counts[expert] for expert in demand]
                yield LayerCall(demand, tokens, step.counted, step.evict, layer, step.number)


def cut_at_ends(trace: Trace, steps: list[Step]) -> list[list[Step]]:
    """The steps between the ends of sequences; a step that ends several is cut after once.

    A sequence ends with the last step that plays one of its tokens.

    Args:
        trace: the recorded routing.
        steps: from `schedule`.

    Returns:
        Runs of steps, none empty, which follow one another as the steps do.
    """
    seq = trace.seq.tolist()
    last_step = {seq[token]: at for at, step in enumerate(steps) for token in step.tokens}
    cuts = [0, *sorted({at + 1 for at in last_step.values()})]
    return [steps[begin:end] for begin, end in pairwise(cuts)]


def _check(trace: Trace, batch: int, prefill: Prefill) -> None:
    num_sequences = len(trace.sequences())
    if not 1 <= batch <= num_sequences:
        raise ConfigError(
            f"batch {batch}: the trace has {num_sequences} sequences: give 1 to {num_sequences}"
        )
    if prefill not in get_args(Prefill):
        raise ConfigError(f"prefill {prefill!r}: give one of {', '.join(get_args(Prefill))}")
    if DECODE not in trace.phase:
        raise ConfigError(
            "the trace has no decode tokens, and only these are counted: record more than one new "
            "token (--max-new-tokens)"
        )


def _next_decode(
    lane: deque[int],
    unused: deque[list[int]],
    phase: list[int],
    prefill: Prefill,
    steps: list[Step],
) -> int | None:
    """The lane's next decode token, with the prefill before it added to `steps`."""
    while lane or unused:
        if not lane:
            lane.extend(unused.popleft())
        prompt = []
        while lane and phase[lane[0]] == PREFILL:
            prompt.append(lane.popleft())
        steps.extend(_prefill_steps(prompt, prefill))
        if lane:
            return lane.popleft()
    return None


def _prefill_steps(prompt: list[int], prefill: Prefill) -> list[Step]:
    if prefill == "warm":
        return [Step([token], counted=False, evict=True) for token in prompt]
    if prefill == "seed" and prompt:
        return [Step(prompt, counted=False, evict=False)]
    return []
