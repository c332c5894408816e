"""Whether a model fits, with how many slots, and how fast it would be: a range, and a bound."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from hotexperts.errors import ConfigError
from hotexperts.plan.machine import Machine
from hotexperts.plan.model import ModelFacts
from hotexperts.plan.speed import LOOP_LAYER_MS, ONE_GPU, part_over_link, prefill_ms, step
from hotexperts.plan.split import Split, part_of, waves
from hotexperts.sizing import (
    CONTEXT_NBYTES,
    SizePlan,
    banks_nbytes,
    capacity_for_budget,
    workspace_nbytes,
)

HOST_RESERVE_NBYTES = 2_000_000_000
PREFILL_TOKENS = (2048, 1024, 512, 256)  # of a step: the first that leaves room for a token


@dataclass(frozen=True, slots=True)
class Forecast:
    """What to expect; ranges are (worst, best). Of several GPUs, of the one with the most to do.

    Attributes:
        capacity: slots a layer.
        reason: where it comes from.
        gpu_nbytes: by part.
        host_nbytes: of experts, for all GPUs together, once they are loaded.
        hit_rate: of demanded experts, in parts of 1.
        missed_gb: a decode step, 10^9 bytes.
        copy_ms: what their copies take, on a link that others may use.
        waves: kernel calls of a layer in a decode step: (least, most).
        decode_tokens_per_s: of all sequences together, in vLLM with its CUDA graphs.
        bound_tokens_per_s: with copies hidden behind compute as far as they can be.
        loop_tokens_per_s: as `decode_tokens_per_s`, in Transformers' own loop; None: it has one
            GPU.
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
    copy_ms: tuple[float, float]
    waves: tuple[int, int]
    decode_tokens_per_s: tuple[float, ...]
    bound_tokens_per_s: float
    loop_tokens_per_s: tuple[float, ...] | None
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
    split: Split = ONE_GPU,
    prefill_tokens: tuple[int, ...] = PREFILL_TOKENS,
) -> Forecast:
    """What to expect on this machine.

    Args:
        facts: the model.
        machine: one GPU.
        budget_nbytes: its memory for everything.
        ram_nbytes: host memory; None: enough.
        context: tokens of each sequence.
        batch: sequences at once.
        split: over how many GPUs, and how. What ranks tell each other takes no time here.
        prefill_tokens: of a step, those to try in turn.

    Raises:
        ConfigError: it does not fit, the message has the sum; or it cannot be split so.
    """
    part = part_of(facts, split)
    if ram_nbytes is not None and facts.expert_nbytes + HOST_RESERVE_NBYTES > ram_nbytes:
        raise ConfigError(
            f"the experts take {facts.expert_nbytes / 1e9:.1f} GB and the system "
            f"{HOST_RESERVE_NBYTES / 1e9:.0f} GB, --ram is {ram_nbytes / 1e9:.1f} GB: take a "
            "model of fewer bits, or more memory; Transformers can also read experts from disk, or "
            "quantise them as they load, of which no forecast is made (--expert-store disk and "
            "--expert-dtype of `hotexperts run`)"
        )
    kv = context * batch * part.kv_nbytes_per_token
    plan, num_tokens = _slots(part, budget_nbytes, kv, batch, prefill_tokens)
    capacity = plan.capacity
    packed = part_over_link(facts, machine, capacity)
    graph = step(facts, machine, capacity, batch, kv, split, packed_part=packed)
    prefill = prefill_ms(facts, machine, capacity, num_tokens, split, packed)
    loop = None
    if split.num_gpus == 1:
        loop_ms = step(facts, machine, capacity, batch, kv, split, LOOP_LAYER_MS, packed).ms
        loop = tuple(1e3 * batch / ms for ms in loop_ms)
    return Forecast(
        capacity=capacity,
        reason=plan.reason,
        gpu_nbytes=_gpu_nbytes(part, capacity, kv, batch, num_tokens),
        host_nbytes=int(packed * facts.expert_nbytes),
        hit_rate=graph.hit_rate,
        missed_gb=graph.missed_gb,
        copy_ms=graph.copy_ms,
        waves=waves(part.layers[0], capacity, batch),
        decode_tokens_per_s=tuple(1e3 * batch / ms for ms in graph.ms),
        bound_tokens_per_s=1e3 * batch / graph.bound_ms,
        loop_tokens_per_s=loop,
        prefill_tokens_per_s=tuple(1e3 * num_tokens / ms for ms in prefill),
        prefill_tokens=num_tokens,
        limit=graph.limit,
    )


def _slots(
    part: ModelFacts, budget_nbytes: int, kv: int, batch: int, prefill_tokens: tuple[int, ...]
) -> tuple[SizePlan, int]:
    """As many as fit beside a prefill step of the most tokens; and so many tokens."""
    *more, least = prefill_tokens
    for num_tokens in more:
        with suppress(ConfigError):
            return _slots_beside(part, budget_nbytes, kv, batch, num_tokens), num_tokens
    return _slots_beside(part, budget_nbytes, kv, batch, least), least


def _slots_beside(
    part: ModelFacts, budget_nbytes: int, kv: int, batch: int, num_tokens: int
) -> SizePlan:
    other = part.other_nbytes + kv + CONTEXT_NBYTES + _workspace(part, num_tokens, batch)
    return capacity_for_budget(budget_nbytes, other, part.layers)


def _gpu_nbytes(
    part: ModelFacts, capacity: int, kv: int, batch: int, num_tokens: int
) -> dict[str, int]:
    return {
        "other weights": part.other_nbytes,
        "KV cache": kv,
        "slots": capacity * sum(shape.row_nbytes for shape in part.layers),
        "banks": banks_nbytes(part.layers, capacity),
        "CUDA context": CONTEXT_NBYTES,
        f"workspace of {num_tokens} tokens": _workspace(part, num_tokens, batch),
    }


def _workspace(part: ModelFacts, num_tokens: int, batch: int) -> int:
    """Of one rank: each has all tokens and logits, and its part of an expert's width."""
    return workspace_nbytes(
        num_tokens,
        batch,
        top_k=part.layers[0].top_k,
        hidden_size=part.hidden_size,
        expert_width=part.expert_width,
        vocab_size=part.vocab_size,
    )
