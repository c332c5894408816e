"""How many slots fit: the arithmetic of "auto" and of a byte budget, without tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hotexperts.config import format_bytes, round_up_bytes
from hotexperts.errors import ConfigError

RESERVE = 0.05  # of the budget, for allocator fragments and what nobody foresees
DEFAULT_BANK_ROWS = 8
MIN_DEMAND_TO_BYPASS = 32  # fewer experts save less than the wave costs that serves who passes by
# Of vLLM: CUDA context, its libraries, and captured graphs: 0.5 to 0.7 GB on an H200.
CONTEXT_NBYTES = 768 << 20
AHEAD_ROWS = 2  # of prefetches: a layer's compute hides the copy of one or two experts
_FLOAT_NBYTES = 4
_ROWS_PER_PAIR = 4  # two workspaces of vLLM's, the rows kept of all waves, and one more while added


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What sizing must know of one MoE layer."""

    num_experts: int
    top_k: int
    row_nbytes: int


@dataclass(frozen=True, slots=True)
class SizePlan:
    """A capacity and the arithmetic behind it.

    Attributes:
        capacity: slots a layer.
        reason: one line for people: where the number comes from.
    """

    capacity: int
    reason: str


def bank_rows(num_experts: int, capacity: int) -> int:
    """Rows of one bank: what a call over capacity streams at a time; 0 where all is resident.

    Never more than the slots of a layer, so that a small cache is not mostly banks.
    """
    return min(DEFAULT_BANK_ROWS, num_experts - capacity, capacity)


def banks_nbytes(layers: Sequence[LayerShape], capacity: int) -> int:
    """Bytes of the banks: two for each kind of row, shared by the layers that have it."""
    rows: dict[int, int] = {}
    for shape in layers:
        needed = bank_rows(shape.num_experts, capacity)
        rows[shape.row_nbytes] = max(rows.get(shape.row_nbytes, 0), needed)
    return 2 * sum(count * row_nbytes for row_nbytes, count in rows.items())


def ahead_nbytes(row_nbytes: Iterable[int]) -> int:
    """Bytes of the rows that prefetches fill, shared by the layers of a kind of row.

    Args:
        row_nbytes: of each kind.
    """
    return AHEAD_ROWS * sum(row_nbytes)


def lift_nbytes(num_before: int, num_after: int) -> int:
    """Bytes of one lift table: counts and scores of two layers' experts (`cache/lift.py`)."""
    counts = (num_before + 1) * (num_after + 1)
    return _FLOAT_NBYTES * (counts + (num_before + 2) * num_after)


def fixed_capacity(num_slots: int, layers: Sequence[LayerShape]) -> SizePlan:
    """A number of slots that the user chose.

    Raises:
        ConfigError: more slots than experts; nothing is clamped in silence.
    """
    most = min(shape.num_experts for shape in layers)
    if num_slots > most:
        raise ConfigError(
            f"expert_cache_size is {num_slots}, but a layer has only {most} experts: "
            f"give at most {most}, or 'auto'"
        )
    return SizePlan(num_slots, f"{num_slots} slots a layer as asked")


def capacity_for_budget(
    budget_bytes: int, other_bytes: int, layers: Sequence[LayerShape], *, prefetch_bytes: int = 0
) -> SizePlan:
    """The most slots, equal for every layer, that a GPU budget holds.

    slots = (budget - 5 % - other - prefetch - banks) / (bytes of a slot in all layers), at most E.

    Args:
        budget_bytes: for weights, slots, banks, KV cache and workspace together.
        other_bytes: all of these but slots, banks and prefetches.
        layers: the MoE layers.
        prefetch_bytes: of rows and tables of prefetches; 0 without.

    Raises:
        ConfigError: fewer slots than experts a token would fit; the message has the sum.
    """
    other_bytes += prefetch_bytes
    slot_bytes = sum(shape.row_nbytes for shape in layers)
    most = min(shape.num_experts for shape in layers)
    least = _least_capacity(layers)
    room = int(budget_bytes * (1 - RESERVE)) - other_bytes
    capacity = next(
        (
            slots
            for slots in range(most, 0, -1)
            if slots * slot_bytes + banks_nbytes(layers, slots) <= room
        ),
        0,
    )
    if capacity < least:
        raise ConfigError(_too_small(budget_bytes, other_bytes, layers, capacity))
    reason = (
        f"{capacity} slots a layer: {format_bytes(budget_bytes)} - 5 % - "
        f"{format_bytes(other_bytes)} (other weights, KV, workspace"
        f"{', prefetch' if prefetch_bytes else ''}) - "
        f"{format_bytes(banks_nbytes(layers, capacity))} (banks) over "
        f"{format_bytes(slot_bytes)} a slot in {len(layers)} layers"
    )
    return SizePlan(capacity, reason)


def workspace_nbytes(
    num_tokens: int,
    num_sequences: int,
    *,
    top_k: int,
    hidden_size: int,
    expert_width: int,
    vocab_size: int,
    itemsize: int = 2,
) -> int:
    """Activations of vLLM's largest step: rows of pairs in MoE layers, tokens, and logits.

    Args:
        num_tokens: of the step.
        num_sequences: that want logits.
        top_k: experts a token.
        hidden_size: numbers of a token between layers.
        expert_width: numbers of a token inside an expert.
        vocab_size: logits of a sequence.
        itemsize: bytes of a number.
    """
    width = max(hidden_size, 2 * expert_width)
    pairs = _ROWS_PER_PAIR * num_tokens * top_k * width * itemsize
    tokens = 8 * num_tokens * hidden_size * itemsize
    logits = 4 * num_sequences * vocab_size * 4  # float32, sorted for top-p
    return pairs + tokens + logits


def _least_capacity(layers: Sequence[LayerShape]) -> int:
    """Slots for the experts of one token."""
    return min(max(shape.top_k for shape in layers), min(shape.num_experts for shape in layers))


def _too_small(
    budget_bytes: int, other_bytes: int, layers: Sequence[LayerShape], capacity: int
) -> str:
    """The sum that a budget does not hold, and a budget that would do."""
    least = _least_capacity(layers)
    most = min(shape.num_experts for shape in layers)
    slot_bytes = sum(shape.row_nbytes for shape in layers)
    cost = {n: n * slot_bytes + banks_nbytes(layers, n) for n in range(least, most + 1)}
    num_slots = min(cost, key=cost.__getitem__)  # more slots may need less: the banks shrink
    needed = (cost[num_slots] + other_bytes) / (1 - RESERVE)
    return (
        f"a GPU budget of {format_bytes(budget_bytes)} holds {capacity} slots a layer, the model "
        f"uses {least} experts a token: {num_slots} slots x {len(layers)} layers "
        f"({format_bytes(num_slots * slot_bytes)}), two banks "
        f"({format_bytes(banks_nbytes(layers, num_slots))}) and the rest "
        f"({format_bytes(other_bytes)}) need {format_bytes(needed)}: give at least "
        f"{round_up_bytes(needed)}, or ask for a shorter context (--context, kv_tokens)"
    )
