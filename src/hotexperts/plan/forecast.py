"""Whether a model fits, with how many slots, and how fast it would be: a range, and a bound."""

from __future__ import annotations

from dataclasses import dataclass

from hotexperts.errors import ConfigError
from hotexperts.plan.machine import Machine
from hotexperts.plan.model import ModelFacts
from hotexperts.plan.split import Split, demand, part_of, waves
from hotexperts.sizing import banks_nbytes, capacity_for_budget

# CUDA context, libraries and captured graphs, activations and workspaces of 2048 tokens.
WORKSPACE_NBYTES = 1_200_000_000
HOST_RESERVE_NBYTES = 2_000_000_000
PREFILL_TOKENS = 2048  # of a step; vLLM takes more on large GPUs
LAYER_MS = 0.06  # of launches and small kernels in a CUDA graph, vLLM on an H200
PART_OF_LINK = 0.92  # what copies by a kernel reach of the copy engine's rate
MOST_MISSES = 1.9  # of recorded routing over drawn: docs/decisions/0013-forecasts-are-ranges.md
ONE_GPU = Split()


@dataclass(frozen=True, slots=True)
class Forecast:
    """What to expect; ranges are (worst, best). Of several GPUs, of the one with the most to do.

    Attributes:
        capacity: slots a layer.
        reason: where it comes from.
        gpu_nbytes: by part.
        host_nbytes: of experts, for all GPUs together.
        hit_rate: of demanded experts, in parts of 1.
        missed_gb: a decode step, 10^9 bytes.
        copy_ms: what their copies take, on a link that others may use.
        waves: kernel calls of a layer in a decode step: (least, most).
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
    copy_ms: tuple[float, float]
    waves: tuple[int, int]
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
    split: Split = ONE_GPU,
) -> Forecast:
    """For vLLM with its CUDA graphs, on this machine.

    Args:
        facts: the model.
        machine: one GPU.
        budget_nbytes: its memory for everything.
        ram_nbytes: host memory; None: enough.
        context: tokens of each sequence.
        batch: sequences at once.
        split: over how many GPUs, and how. What ranks tell each other takes no time here.

    Raises:
        ConfigError: it does not fit, the message has the sum; or it cannot be split so.
    """
    part = part_of(facts, split)
    if ram_nbytes is not None and facts.expert_nbytes + HOST_RESERVE_NBYTES > ram_nbytes:
        raise ConfigError(
            f"the experts take {facts.expert_nbytes / 1e9:.1f} GB and the system "
            f"{HOST_RESERVE_NBYTES / 1e9:.0f} GB, --ram is {ram_nbytes / 1e9:.1f} GB: take a "
            "model of fewer bits, or more memory"
        )
    kv = context * batch * part.kv_nbytes_per_token
    plan = capacity_for_budget(
        budget_nbytes, part.other_nbytes + kv + WORKSPACE_NBYTES, part.layers
    )
    gpu = {
        "other weights": part.other_nbytes,
        "KV cache": kv,
        "slots": plan.capacity * sum(shape.row_nbytes for shape in part.layers),
        "banks": banks_nbytes(part.layers, plan.capacity),
        "context and workspace": WORKSPACE_NBYTES,
    }
    speed = step(facts, machine, plan.capacity, batch, kv, split)
    return Forecast(
        plan.capacity,
        plan.reason,
        gpu,
        facts.expert_nbytes,
        speed.hit_rate,
        speed.missed_gb,
        speed.copy_ms,
        waves(part.layers[0], plan.capacity, batch),
        tuple(1e3 * batch / ms for ms in speed.ms),
        1e3 * batch / speed.bound_ms,
        _prefill_tokens_per_s(part, machine, plan.capacity, split),
        speed.limit,
    )


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
    """
    shape, part = facts.layers[0], part_of(facts, split)
    num_ranks = split.num_gpus if split.parallel == "ep" else 1  # that have experts of their own
    asked = demand(shape.num_experts, shape.top_k, capacity, batch, num_ranks)
    expert_gb = sum(layer.row_nbytes for layer in part.layers) / 1e9
    read_gb = (part.other_nbytes + kv_nbytes) / 1e9 + asked.demanded * expert_gb
    resident_ms = 1e3 * read_gb / machine.memory_gb_s + LAYER_MS * facts.num_layers
    pair = (min(asked.demanded, MOST_MISSES * asked.missed), asked.missed)
    # Ranks on one link take turns: it brings what all of them miss, and the most to one alone.
    together = max(1.0, split.gpus_per_link * asked.mean_missed / max(asked.missed, 1e-9))
    gb_ms = 1e3 * together / machine.link_gb_s
    link_ms = (pair[0] * expert_gb * gb_ms, pair[1] * expert_gb * gb_ms)
    copy_ms = (link_ms[0] / PART_OF_LINK, link_ms[1] / PART_OF_LINK)
    return Step(
        (1 - pair[0] / asked.demanded, 1 - pair[1] / asked.demanded),
        (pair[0] * expert_gb, pair[1] * expert_gb),
        copy_ms,
        (resident_ms + copy_ms[0], resident_ms + copy_ms[1]),
        max(resident_ms, link_ms[1]),
        "the link" if link_ms[1] > resident_ms else "the GPU's memory",
    )


def _prefill_tokens_per_s(
    facts: ModelFacts, machine: Machine, capacity: int, split: Split
) -> float:
    """A step of a long prompt asks for every expert, and all that are absent stream.

    Args:
        facts: a rank's part of the model.
        machine: one GPU.
        capacity: slots of a rank's layer.
        split: how many ranks stream over one link.
    """
    absent_gb = sum((s.num_experts - capacity) * s.row_nbytes for s in facts.layers) / 1e9
    absent_gb *= split.gpus_per_link
    resident_gb = (facts.other_nbytes + facts.expert_nbytes) / 1e9
    stream_s = absent_gb / (PART_OF_LINK * machine.link_gb_s)
    read_s = resident_gb / machine.memory_gb_s + 1e-3 * LAYER_MS * facts.num_layers
    return PREFILL_TOKENS / max(stream_s, read_s)
