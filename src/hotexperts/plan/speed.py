"""How long a decode step and a prefill step take: ranges, and a bound."""

from __future__ import annotations

from dataclasses import dataclass

from hotexperts.config import FAST_LINK_GB_S
from hotexperts.plan.machine import Machine
from hotexperts.plan.model import ModelFacts
from hotexperts.plan.split import Split, demand, part_of

GRAPH_LAYER_MS = 0.06  # of launches and small kernels in a CUDA graph, vLLM on an H200
LOOP_LAYER_MS = 1.4  # in Transformers' own loop there, which launches each kernel from Python
# More of it where ranks tell each other what they found, on two H200 at batch 1.
RANKS_LAYER_MS = {"tp": 0.016, "ep": 0.04}
KERNEL_PART_OF_LINK = 0.925  # what copies by a kernel reach of the copy engine's rate
ENGINE_PART_OF_LINK = 0.99  # what the copy engine reaches of it, which serves prefills
PACKED_PART = 0.754  # of bf16 experts' bytes cross the link: docs/decisions/0016
PART_OF_TFLOPS = 0.2  # what matrix products of a prefill reached on an H200
ONE_GPU = Split()


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step; pairs are (worst, best)."""

    hit_rate: tuple[float, float]
    missed_gb: tuple[float, float]
    copy_ms: tuple[float, float]
    ms: tuple[float, float]
    bound_ms: float
    limit: str


def step(
    facts: ModelFacts,
    machine: Machine,
    capacity: int,
    batch: int,
    kv_nbytes: int,
    split: Split = ONE_GPU,
    layer_ms: float = GRAPH_LAYER_MS,
    packed_part: float = 1.0,
) -> Step:
    """What a decode step of so many sequences takes.

    Resident time: what is read, at the memory's rate, and a fixed part for each layer. Copies come
    on top, one after another, as on demand they do. All ranks wait for the one that copies most.

    Args:
        facts: the whole model.
        machine: one GPU.
        capacity: slots of a rank's layer.
        batch: sequences.
        kv_nbytes: that a rank reads.
        split: over GPUs.
        layer_ms: the fixed part.
        packed_part: of the missed bytes cross the link.
    """
    shape, part = facts.layers[0], part_of(facts, split)
    num_ranks = split.num_gpus if split.parallel == "ep" else 1  # that have experts of their own
    asked = demand(shape.num_experts, shape.top_k, capacity, batch, num_ranks)
    expert_gb = sum(layer.row_nbytes for layer in part.layers) / 1e9
    read_gb = (part.other_nbytes + kv_nbytes) / 1e9 + asked.demanded * expert_gb
    if split.num_gpus > 1:
        layer_ms += RANKS_LAYER_MS[split.parallel]
    resident_ms = 1e3 * read_gb / machine.memory_gb_s + layer_ms * facts.num_layers
    most = most_misses(part.layers[0].num_experts, capacity, batch)
    pair = (min(asked.demanded, most * asked.missed), asked.missed)
    # Ranks on one link take turns: it brings what all of them miss, and the most to one alone.
    together = max(1.0, split.gpus_per_link * asked.mean_missed / max(asked.missed, 1e-9))
    gb_ms = 1e3 * together * packed_part / machine.link_gb_s
    link_ms = (pair[0] * expert_gb * gb_ms, pair[1] * expert_gb * gb_ms)
    copy_ms = (link_ms[0] / KERNEL_PART_OF_LINK, link_ms[1] / KERNEL_PART_OF_LINK)
    return Step(
        (1 - pair[0] / asked.demanded, 1 - pair[1] / asked.demanded),
        (pair[0] * expert_gb, pair[1] * expert_gb),
        copy_ms,
        (resident_ms + copy_ms[0], resident_ms + copy_ms[1]),
        max(resident_ms, link_ms[1]),
        "the link" if link_ms[1] > resident_ms else "how fast the GPU's memory is",
    )


def part_over_link(facts: ModelFacts, machine: Machine, capacity: int) -> float:
    """What packing by default leaves of the experts' bytes: less than 1 where it takes place."""
    if facts.is_gguf or machine.link_gb_s >= FAST_LINK_GB_S:
        return 1.0
    if capacity >= max(shape.num_experts for shape in facts.layers):
        return 1.0
    share = facts.expert_kinds.get("BF16", 0) / facts.expert_nbytes
    return 1 - share * (1 - PACKED_PART)


def most_misses(num_experts: int, capacity: int, batch: int) -> float:
    """How many times the misses of drawn routing recorded ones were, at most.

    The more slots, the rarer a miss, and the more of them are the recorded text's own; sequences
    that share the slots even that out. See docs/decisions/0013-forecasts-are-ranges.md.
    """
    return float(1 + min(1.5, 3.5 * capacity / num_experts) / batch**0.5)


def prefill_ms(
    facts: ModelFacts,
    machine: Machine,
    capacity: int,
    num_tokens: int,
    split: Split = ONE_GPU,
    packed_part: float = 1.0,
) -> tuple[float, float]:
    """A step of so many tokens of prompts, at worst and at best.

    It asks for every expert, and all that are absent stream. At best that hides computing, or the
    other way round; at worst one follows the other. Ranks share the computing evenly, and those on
    one link take turns.

    Args:
        facts: the whole model.
        machine: one GPU.
        capacity: slots of a rank's layer.
        num_tokens: of the step.
        split: over GPUs.
        packed_part: of the absent bytes cross the link; kernels unpack what is packed.
    """
    part = part_of(facts, split)
    absent_gb = sum((s.num_experts - capacity) * s.row_nbytes for s in part.layers) / 1e9
    absent_gb *= split.gpus_per_link
    part_of_link = ENGINE_PART_OF_LINK if packed_part == 1 else KERNEL_PART_OF_LINK
    stream_ms = 1e3 * absent_gb * packed_part / (part_of_link * machine.link_gb_s)
    read_gb = (part.other_nbytes + part.expert_nbytes) / 1e9
    read_ms = 1e3 * read_gb / machine.memory_gb_s + GRAPH_LAYER_MS * facts.num_layers
    flops = num_tokens * _flops_per_token(facts) / split.num_gpus
    resident_ms = max(read_ms, flops / (PART_OF_TFLOPS * machine.tflops * 1e9))
    return stream_ms + resident_ms, max(stream_ms, read_ms)


def _flops_per_token(facts: ModelFacts) -> float:
    """Of the experts that a token asks for, and of the rest as if it were in 16 bits.

    The rest counts embeddings too, which make up for attention among the tokens of a prompt.
    """
    matrices = 3 * facts.hidden_size * facts.expert_width
    experts = sum(shape.top_k for shape in facts.layers) * matrices
    return 2.0 * (experts + facts.other_nbytes / 2)
