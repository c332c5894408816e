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
from hotexperts.sizing import (
    CONTEXT_NBYTES,
    SizePlan,
    banks_nbytes,
    capacity_for_budget,
    workspace_nbytes,
)

HOST_RESERVE_NBYTES = 2_000_000_000
PREFILL_TOKENS = (2048, 1024, 512, 256)  # of a step: the first that leaves room for a token
GRAPH_LAYER_MS = 0.06  # of launches and small kernels in a CUDA graph, vLLM on an H200
LOOP_LAYER_MS = 1.4  # in Transformers' own loop there, which launches each kernel from Python
KERNEL_PART_OF_LINK = 0.925  # what copies by a kernel reach of the copy engine's rate
ENGINE_PART_OF_LINK = 0.99  # what the copy engine reaches of it, which serves prefills
PART_OF_TFLOPS = 0.2  # what matrix products of a prefill reached on an H200
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
        decode_tokens_per_s: of all sequences together, in vLLM with its CUDA graphs.
        bound_tokens_per_s: with copies hidden behind compute as far as they can be.
        loop_tokens_per_s: as `decode_tokens_per_s`, in Transformers' own loop.
        prefill_tokens_per_s: of long prompts.
        prefill_tokens: of a step of it.
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
    loop_tokens_per_s: tuple[float, ...]
    prefill_tokens_per_s: tuple[float, ...]
    prefill_tokens: int
    limit: str


def forecast(
    facts: ModelFacts,
    machine: Machine,
    *,
    budget_nbytes: int,
    ram_nbytes: int | None,
    context: int,
    batch: int,
    prefill_tokens: tuple[int, ...] = PREFILL_TOKENS,
) -> Forecast:
    """What to expect on this machine.

    Args:
        facts: the model.
        machine: the GPU.
        budget_nbytes: GPU memory for everything.
        ram_nbytes: host memory; None: enough.
        context: tokens of each sequence.
        batch: sequences at once.
        prefill_tokens: of a step, those to try in turn.

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
    plan, num_tokens = _slots(facts, budget_nbytes, kv, batch, prefill_tokens)
    gpu = {
        "other weights": facts.other_nbytes,
        "KV cache": kv,
        "slots": plan.capacity * sum(shape.row_nbytes for shape in facts.layers),
        "banks": banks_nbytes(facts.layers, plan.capacity),
        "CUDA context": CONTEXT_NBYTES,
        f"workspace of {num_tokens} tokens": _workspace(facts, num_tokens, batch),
    }
    graph = step(facts, machine, plan.capacity, batch, kv)
    loop = step(facts, machine, plan.capacity, batch, kv, LOOP_LAYER_MS)
    prefill = prefill_ms(facts, machine, plan.capacity, num_tokens)
    return Forecast(
        capacity=plan.capacity,
        reason=plan.reason,
        gpu_nbytes=gpu,
        host_nbytes=facts.expert_nbytes,
        hit_rate=graph.hit_rate,
        missed_gb=graph.missed_gb,
        decode_tokens_per_s=tuple(1e3 * batch / ms for ms in graph.ms),
        bound_tokens_per_s=1e3 * batch / graph.bound_ms,
        loop_tokens_per_s=tuple(1e3 * batch / ms for ms in loop.ms),
        prefill_tokens_per_s=tuple(1e3 * num_tokens / ms for ms in prefill),
        prefill_tokens=num_tokens,
        limit=graph.limit,
    )


def _slots(
    facts: ModelFacts, budget_nbytes: int, kv: int, batch: int, prefill_tokens: tuple[int, ...]
) -> tuple[SizePlan, int]:
    """As many as fit beside a prefill step of the most tokens; and so many tokens."""
    for num_tokens in prefill_tokens:
        other = facts.other_nbytes + kv + CONTEXT_NBYTES + _workspace(facts, num_tokens, batch)
        try:
            return capacity_for_budget(budget_nbytes, other, facts.layers), num_tokens
        except ConfigError:
            if num_tokens == prefill_tokens[-1]:
                raise
    raise AssertionError("at least one number of tokens")


def _workspace(facts: ModelFacts, num_tokens: int, batch: int) -> int:
    return workspace_nbytes(
        num_tokens,
        batch,
        top_k=facts.layers[0].top_k,
        hidden_size=facts.hidden_size,
        expert_width=facts.expert_width,
        vocab_size=facts.vocab_size,
    )


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step; pairs are (worst, best)."""

    hit_rate: tuple[float, float]
    missed_gb: tuple[float, float]
    ms: tuple[float, float]
    bound_ms: float
    limit: str


def step(
    facts: ModelFacts,
    machine: Machine,
    capacity: int,
    batch: int,
    kv_nbytes: int,
    layer_ms: float = GRAPH_LAYER_MS,
) -> Step:
    """What a decode step of so many sequences takes.

    Resident time: what is read, at the memory's rate, and a fixed part for each layer. Copies come
    on top, one after another, as on demand they do.
    """
    shape = facts.layers[0]
    demanded, missed = misses(shape.num_experts, shape.top_k, capacity, batch)
    expert_gb = sum(layer.row_nbytes for layer in facts.layers) / 1e9
    read_gb = (facts.other_nbytes + kv_nbytes) / 1e9 + demanded * expert_gb
    resident_ms = 1e3 * read_gb / machine.memory_gb_s + layer_ms * facts.num_layers
    pair = (min(demanded, most_misses(shape.num_experts, capacity, batch) * missed), missed)
    copies = tuple(count * expert_gb for count in pair)
    link_ms = tuple(1e3 * gb / machine.link_gb_s for gb in copies)
    worst, best = (resident_ms + ms / KERNEL_PART_OF_LINK for ms in link_ms)
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


def most_misses(num_experts: int, capacity: int, batch: int) -> float:
    """How many times the misses of drawn routing recorded ones were, at most.

    The more slots, the rarer a miss, and the more of them are the recorded text's own; sequences
    that share the slots even that out. See docs/decisions/0013-forecasts-are-ranges.md.
    """
    return float(1 + min(1.5, 3.5 * capacity / num_experts) / batch**0.5)


def prefill_ms(
    facts: ModelFacts, machine: Machine, capacity: int, num_tokens: int
) -> tuple[float, float]:
    """A step of so many tokens of prompts, at worst and at best.

    It asks for every expert, and all that are absent stream. At best that hides computing, or the
    other way round; at worst one follows the other.
    """
    absent_gb = sum((s.num_experts - capacity) * s.row_nbytes for s in facts.layers) / 1e9
    stream_ms = 1e3 * absent_gb / (ENGINE_PART_OF_LINK * machine.link_gb_s)
    read_gb = (facts.other_nbytes + facts.expert_nbytes) / 1e9
    read_ms = 1e3 * read_gb / machine.memory_gb_s + GRAPH_LAYER_MS * facts.num_layers
    compute_ms = num_tokens * _flops_per_token(facts) / (PART_OF_TFLOPS * machine.tflops * 1e9)
    resident_ms = max(read_ms, compute_ms)
    return stream_ms + resident_ms, max(stream_ms, read_ms)


def _flops_per_token(facts: ModelFacts) -> float:
    """Of the experts that a token asks for, and of the rest as if it were in 16 bits.

    The rest counts embeddings too, which make up for attention among the tokens of a prompt.
    """
    matrices = 3 * facts.hidden_size * facts.expert_width
    experts = sum(shape.top_k for shape in facts.layers) * matrices
    return 2.0 * (experts + facts.other_nbytes / 2)
