"""Whether a model fits, with how many slots, and how fast it would be: a range, and a bound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from hotexperts.errors import ConfigError
from hotexperts.plan.machine import Machine
from hotexperts.plan.model import ModelFacts
from hotexperts.policy import DEFAULT_POLICY
from hotexperts.simulate import Trace, bound, replay
from hotexperts.simulate.generate import TraceSize, generate
from hotexperts.sizing import banks_nbytes, capacity_for_budget

# CUDA context, libraries and captured graphs, activations and workspaces of 2048 tokens.
WORKSPACE_NBYTES = 1_200_000_000
HOST_RESERVE_NBYTES = 2_000_000_000
PREFILL_TOKENS = 2048  # of a step; vLLM takes more on large GPUs
LAYER_MS = 0.06  # of launches and small kernels in a CUDA graph, vLLM on an H200
PART_OF_LINK = 0.92  # what copies by a kernel reach of the copy engine's rate
MOST_MISSES = 1.9  # of recorded routing over drawn: docs/decisions/0013-forecasts-are-ranges.md
_NUM_SEQUENCES, _NUM_TOKENS, _SEED = 24, 100, 7  # of what is drawn


@dataclass(frozen=True, slots=True)
class Forecast:
    """What to expect; ranges are (worst, best).

    Attributes:
        capacity: slots a layer.
        reason: where it comes from.
        gpu_nbytes: by part.
        host_nbytes: of experts.
        hit_rate: of demanded experts, in parts of 1.
        missed_gb: a decode step, 10^9 bytes.
        decode_tokens_per_s: of all sequences together.
        bound_tokens_per_s: with copies hidden behind compute as far as they can be.
        prefill_tokens_per_s: of long prompts, at most: computing is not counted.
        limit: what the speed depends on most.
    """

    capacity: int
    reason: str
    gpu_nbytes: dict[str, int]
    host_nbytes: int
    hit_rate: tuple[float, float]
    missed_gb: tuple[float, float]
    decode_tokens_per_s: tuple[float, ...]
    bound_tokens_per_s: float
    prefill_tokens_per_s: float
    limit: str


def forecast(
    facts: ModelFacts,
    machine: Machine,
    *,
    budget_nbytes: int,
    ram_nbytes: int | None,
    context: int,
    batch: int,
) -> Forecast:
    """For vLLM with its CUDA graphs, on this machine.

    Args:
        facts: the model.
        machine: the GPU.
        budget_nbytes: GPU memory for everything.
        ram_nbytes: host memory; None: enough.
        context: tokens of each sequence.
        batch: sequences at once.

    Raises:
        ConfigError: it does not fit; the message has the sum.
    """
    if ram_nbytes is not None and facts.expert_nbytes + HOST_RESERVE_NBYTES > ram_nbytes:
        raise ConfigError(
            f"the experts take {facts.expert_nbytes / 1e9:.1f} GB and the system "
            f"{HOST_RESERVE_NBYTES / 1e9:.0f} GB, --ram is {ram_nbytes / 1e9:.1f} GB: take a "
            "model of fewer bits, or more memory"
        )
    kv = context * batch * facts.kv_nbytes_per_token
    plan = capacity_for_budget(
        budget_nbytes, facts.other_nbytes + kv + WORKSPACE_NBYTES, facts.layers
    )
    gpu = {
        "other weights": facts.other_nbytes,
        "KV cache": kv,
        "slots": plan.capacity * sum(shape.row_nbytes for shape in facts.layers),
        "banks": banks_nbytes(facts.layers, plan.capacity),
        "context and workspace": WORKSPACE_NBYTES,
    }
    speed = step(facts, machine, plan.capacity, batch, kv)
    return Forecast(
        plan.capacity,
        plan.reason,
        gpu,
        facts.expert_nbytes,
        speed.hit_rate,
        speed.missed_gb,
        tuple(1e3 * batch / ms for ms in speed.ms),
        1e3 * batch / speed.bound_ms,
        _prefill_tokens_per_s(facts, machine, plan.capacity),
        speed.limit,
    )


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step; pairs are (worst, best)."""

    hit_rate: tuple[float, float]
    missed_gb: tuple[float, float]
    ms: tuple[float, float]
    bound_ms: float
    limit: str


def step(facts: ModelFacts, machine: Machine, capacity: int, batch: int, kv_nbytes: int) -> Step:
    """What a decode step of so many sequences takes.

    Resident time: what is read, at the memory's rate, and a fixed part for each layer. Copies come
    on top, one after another, as on demand they do.
    """
    shape = facts.layers[0]
    demanded, missed = misses(shape.num_experts, shape.top_k, capacity, batch)
    expert_gb = sum(layer.row_nbytes for layer in facts.layers) / 1e9
    read_gb = (facts.other_nbytes + kv_nbytes) / 1e9 + demanded * expert_gb
    resident_ms = 1e3 * read_gb / machine.memory_gb_s + LAYER_MS * facts.num_layers
    pair = (min(demanded, MOST_MISSES * missed), missed)
    copies = tuple(count * expert_gb for count in pair)
    link_ms = tuple(1e3 * gb / machine.link_gb_s for gb in copies)
    worst, best = (resident_ms + ms / PART_OF_LINK for ms in link_ms)
    hit_worst, hit_best = (1 - count / demanded for count in pair)
    return Step(
        (hit_worst, hit_best),
        (copies[0], copies[1]),
        (worst, best),
        max(resident_ms, link_ms[1]),
        "the link" if link_ms[1] > resident_ms else "the GPU's memory",
    )


@cache
def misses(num_experts: int, top_k: int, capacity: int, batch: int) -> tuple[float, float]:
    """Experts that a layer is asked for in a step, and those of them that are not there.

    Replayed: routing drawn for this shape, through the default policy.
    """
    num_sequences = _NUM_SEQUENCES * (1 + batch // _NUM_SEQUENCES)
    size = TraceSize(num_sequences, _NUM_TOKENS, 1, num_experts, top_k)
    ids = np.stack(list(generate("fitted", size, _SEED))).reshape(-1, 1, top_k)
    sequences = np.repeat(np.arange(size.num_sequences), size.num_tokens)
    phase = np.ones(len(ids), np.int32)
    trace = Trace(ids, phase, sequences, {"n_experts": num_experts})
    found = replay(trace, DEFAULT_POLICY, capacity, batch)
    first_touches = bound("infinite", trace, capacity, batch).total.misses  # a server has had them
    events = found.total.calls
    return found.total.demands / events, (found.total.misses - first_touches) / events


def _prefill_tokens_per_s(facts: ModelFacts, machine: Machine, capacity: int) -> float:
    """A step of a long prompt asks for every expert, and all that are absent stream."""
    absent_gb = sum((s.num_experts - capacity) * s.row_nbytes for s in facts.layers) / 1e9
    resident_gb = (facts.other_nbytes + facts.expert_nbytes) / 1e9
    stream_s = absent_gb / (PART_OF_LINK * machine.link_gb_s)
    read_s = resident_gb / machine.memory_gb_s + 1e-3 * LAYER_MS * facts.num_layers
    return PREFILL_TOKENS / max(stream_s, read_s)
