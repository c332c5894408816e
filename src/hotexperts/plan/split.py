"""One rank's part of a model on several GPUs, and what its experts' split asks of its link."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from hotexperts.errors import ConfigError
from hotexperts.plan.model import ModelFacts
from hotexperts.policy import DEFAULT_POLICY
from hotexperts.simulate import Trace
from hotexperts.simulate.generate import TraceSize, generate
from hotexperts.simulate.replay import misses_by_step
from hotexperts.simulate.schedule import layer_calls, schedule
from hotexperts.simulate.trace import NOT_RECORDED
from hotexperts.sizing import MIN_DEMAND_TO_BYPASS, LayerShape, bank_rows

Parallel = Literal["tp", "ep"]
Counts = npt.NDArray[np.int64]
_ROW_ALIGNMENT_BYTES = 256
_NUM_SEQUENCES, _NUM_TOKENS, _SEED = 24, 100, 7  # of what is drawn


@dataclass(frozen=True, slots=True)
class Split:
    """How a model is spread over GPUs.

    Attributes:
        num_gpus: tensor-parallel ranks.
        parallel: "tp" cuts every expert, "ep" gives each rank whole ones.
        gpus_per_link: that copy over the same link to the host; 1: each has its own.

    Raises:
        ConfigError: numbers that do not fit together.
    """

    num_gpus: int = 1
    parallel: Parallel = "tp"
    gpus_per_link: int = 1

    def __post_init__(self) -> None:
        if self.parallel not in get_args(Parallel):
            raise ConfigError(
                f"--parallel {self.parallel!r}: give one of {', '.join(get_args(Parallel))}"
            )
        if self.num_gpus < 1 or not 1 <= self.gpus_per_link <= self.num_gpus:
            raise ConfigError(
                f"{self.num_gpus} GPUs, {self.gpus_per_link} on a link: give --gpus of at least 1 "
                "and --gpus-per-link from 1 to as many"
            )

    def other_way(self) -> Split | None:
        """The same GPUs with experts spread the other way; None: there is one."""
        if self.num_gpus == 1:
            return None
        return replace(self, parallel="tp" if self.parallel == "ep" else "ep")


class Demand(NamedTuple):
    """What a layer asks of the rank that is asked most, a step, in experts.

    Attributes:
        demanded: different experts.
        missed: of them, those that are not there.
        mean_missed: of a rank on average.
    """

    demanded: float
    missed: float
    mean_missed: float


def part_of(facts: ModelFacts, split: Split) -> ModelFacts:
    """What one rank holds; the largest part where they differ.

    Norms and routers, which every rank has whole, are counted as if they were divided.

    Raises:
        ConfigError: vLLM cannot cut the model so.
    """
    n = split.num_gpus
    if n == 1:
        return facts
    if facts.num_heads % n:
        raise ConfigError(
            f"--gpus {n}: {facts.num_heads} attention heads cannot be divided so: give one of "
            f"{', '.join(str(k) for k in range(1, n) if not facts.num_heads % k)}"
        )
    part = _tensor_part if split.parallel == "tp" else _expert_part
    layers = tuple(part(facts, shape, n) for shape in facts.layers)
    return replace(
        facts,
        layers=layers,
        other_nbytes=-(-facts.other_nbytes // n),
        expert_nbytes=sum(shape.num_experts * shape.row_nbytes for shape in layers),
        kv_nbytes_per_token=-(-facts.kv_nbytes_per_token // min(n, facts.kv_parts)),
        expert_width=facts.expert_width // (n if split.parallel == "tp" else 1),
    )


def _tensor_part(facts: ModelFacts, shape: LayerShape, n: int) -> LayerShape:
    width, multiple = facts.expert_width, facts.expert_width_multiple
    if width % (n * multiple):
        blocks = f", in blocks of {multiple}" if multiple > 1 else ""
        raise ConfigError(
            f"--gpus {n} --parallel tp: an expert's {width} columns cannot be divided so{blocks}: "
            "give --parallel ep, or fewer GPUs"
        )
    row = -(-shape.row_nbytes // n)
    return replace(shape, row_nbytes=-(-row // _ROW_ALIGNMENT_BYTES) * _ROW_ALIGNMENT_BYTES)


def _expert_part(facts: ModelFacts, shape: LayerShape, n: int) -> LayerShape:
    if shape.num_experts < n:
        raise ConfigError(
            f"--gpus {n} --parallel ep: a layer has {shape.num_experts} experts: give fewer GPUs"
        )
    return replace(shape, num_experts=-(-shape.num_experts // n))


def waves(shape: LayerShape, capacity: int, batch: int) -> tuple[int, int]:
    """Kernel calls of a layer in a decode step, which follow from shapes alone: (least, most).

    The most counts one more for experts that may pass by where many are asked for.

    Args:
        shape: of one rank's layer; all of a step's ids come to it, of its experts or not.
        capacity: slots.
        batch: sequences at once.
    """
    rows = bank_rows(shape.num_experts, capacity)
    if rows == 0:
        return 1, 1
    needed = min(batch * shape.top_k, shape.num_experts)
    absent = max(0, needed - capacity)
    passing = rows if needed >= MIN_DEMAND_TO_BYPASS else 0
    most = min(absent + passing, shape.num_experts - capacity)
    return 1 + -(-absent // rows), 1 + -(-most // rows)


@cache
def demand(num_experts: int, top_k: int, capacity: int, batch: int, num_ranks: int = 1) -> Demand:
    """Replayed: routing drawn for this shape, through the default policy.

    Args:
        num_experts: of a layer, of all ranks.
        top_k: of them, for a token.
        capacity: slots of each rank.
        batch: sequences at once.
        num_ranks: among which the experts are divided, as `num_experts` says, in order.
    """
    num_sequences = _NUM_SEQUENCES * (1 + batch // _NUM_SEQUENCES)
    size = TraceSize(num_sequences, _NUM_TOKENS, 1, num_experts, top_k)
    ids = np.stack(list(generate("fitted", size, _SEED))).reshape(-1, 1, top_k)
    sequences = np.repeat(np.arange(size.num_sequences), size.num_tokens)
    phase = np.ones(len(ids), np.int32)
    trace = Trace(ids, phase, sequences, {"n_experts": num_experts})
    return demand_of(trace, capacity, batch, num_ranks)


def demand_of(trace: Trace, capacity: int, batch: int, num_ranks: int) -> Demand:
    """The same of decode in a trace, the mean over its steps and layers.

    A server has had every expert before, so that what no cache could have had does not count.
    """
    parts = [_of_rank(trace, rank, num_ranks) for rank in range(num_ranks)]
    asked = np.stack([_asked(part, batch) for part in parts])
    missed = np.stack([_missed(part, capacity, batch) for part in parts])
    return Demand(float(asked.max(0).mean()), float(missed.max(0).mean()), float(missed.mean()))


def _of_rank(trace: Trace, rank: int, num_ranks: int) -> Trace:
    """What is asked of one rank's experts, by numbers of its own."""
    num_local = -(-trace.num_experts // num_ranks)
    local = trace.ids - rank * num_local
    is_here = (trace.ids != NOT_RECORDED) & (local >= 0) & (local < num_local)
    ids = np.where(is_here, local, NOT_RECORDED)
    return Trace(ids, trace.phase, trace.seq, {"n_experts": num_local})


def _asked(trace: Trace, batch: int) -> Counts:
    """Different experts, `[step, layer]`."""
    steps = schedule(trace, batch, "warm")
    found = np.zeros((sum(step.counted for step in steps), trace.num_layers), np.int64)
    for call in layer_calls(trace, steps, *range(trace.num_layers)):
        if call.counted:
            found[call.step, call.layer] = len(call.demand)
    return found


def _missed(trace: Trace, capacity: int, batch: int) -> Counts:
    """Those that an earlier step had asked for and that are not there, `[step, layer]`."""
    num_experts = trace.num_experts
    with_all = misses_by_step(trace, "lru", num_experts, batch)
    if capacity >= num_experts:
        return np.zeros_like(with_all)
    return misses_by_step(trace, DEFAULT_POLICY, capacity, batch) - with_all
