"""What of the GPU's memory is not for slots, before vLLM has profiled; and what the host has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hotexperts.cache.host_memory import available_host_bytes
from hotexperts.config import Bytes, CacheSize, Prefetch, format_bytes
from hotexperts.errors import ConfigError, HostMemoryError
from hotexperts.integrations.vllm.options import flag
from hotexperts.integrations.vllm.ranks import largest_of_ranks
from hotexperts.sizing import (
    CONTEXT_NBYTES,
    LayerShape,
    SizePlan,
    ahead_nbytes,
    bank_rows,
    capacity_for_budget,
    fixed_capacity,
    lift_nbytes,
)
from hotexperts.sizing import workspace_nbytes as step_nbytes

NUM_SEQUENCES = 4  # of the greatest length have room, unless vLLM is told another size
_GATE_ITEMSIZE = 4  # at most
WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")  # ways of guessing tokens


def plan_slots(
    size: CacheSize,
    shapes: Sequence[LayerShape],
    config: Any,
    layer: Any,
    device: torch.device,
    *,
    experts_nbytes: int,
    most: int | None,
    prefetch: Prefetch = "off",
) -> SizePlan:
    """How many slots each layer gets.

    Args:
        size: as the user gave it.
        shapes: of the model's layers.
        config: vLLM's `VllmConfig`.
        layer: the first of them, vLLM's `RoutedExperts`.
        device: of the slots.
        experts_nbytes: of its experts that are on the device now and will not be.
        most: of a draft model, the slots of the model that it drafts for, which has the budget.
        prefetch: as the user gave it.

    Raises:
        ConfigError: the slots do not fit.
    """
    if isinstance(size, int) and not isinstance(size, Bytes):
        return fixed_capacity(size, shapes)
    if most is not None:
        return fixed_capacity(min(most, shapes[0].num_experts), shapes)
    total = total_nbytes(size, config, device)
    other = other_nbytes(config, device, layer, experts_nbytes)
    other = largest_of_ranks(other)  # so that all have equal slots
    ahead = prefetch_nbytes(prefetch, shapes, layer.hidden_size)
    return capacity_for_budget(total, other, shapes, prefetch_bytes=ahead)


def prefetch_nbytes(how: Prefetch, shapes: Sequence[LayerShape], hidden_size: int) -> int:
    """Rows of prefetches, and of each pair of layers its lift table or its scaled copy of a gate.

    Which layers have a gate is not known yet: of those that may, the larger of the two counts.

    Args:
        how: "off", "router" or "lift".
        shapes: of the model's layers, whose rows are all of one kind.
        hidden_size: numbers of a token between layers, and of a gate's row.
    """
    if how == "off":
        return 0
    needed = ahead_nbytes({shape.row_nbytes for shape in shapes})
    for before, after in itertools.pairwise(shapes):
        table = lift_nbytes(before.num_experts, after.num_experts)
        gate = after.num_experts * hidden_size * _GATE_ITEMSIZE if how == "router" else 0
        needed += max(table, gate)
    return needed


def describe_waves(num_tokens: int, top_k: int, *, capacity: int, num_experts: int) -> str:
    """What a step of so many tokens, and a token, ask of a layer."""
    absent = max(0, min(num_tokens * top_k, num_experts) - capacity)
    num_waves = 1 + -(-absent // max(1, bank_rows(num_experts, capacity)))
    found = f"at most {num_waves} waves in a step of {num_tokens} tokens"
    if capacity < top_k:
        found += f"; a token asks for {top_k} experts, more than the slots: it streams them"
    return found


def total_nbytes(size: Any, config: Any, device: torch.device) -> int:
    """All that vLLM may use: what the user gave, else its share of the GPU.

    Raises:
        ConfigError: there is no GPU.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"{flag('size')} auto and {flag('gib')} need a GPU: give {flag('size')} N"
        )
    if isinstance(size, Bytes):
        return size.num_bytes
    total = torch.cuda.get_device_properties(device).total_memory
    return int(config.cache_config.gpu_memory_utilization * total)


def other_nbytes(config: Any, device: torch.device, layer: Any, experts_nbytes: int) -> int:
    """Weights other than experts, KV cache, workspace, and what PyTorch does not count.

    Args:
        config: vLLM's `VllmConfig`.
        device: the GPU.
        layer: one MoE layer, the first.
        experts_nbytes: of its experts, which are on the GPU now and will not be.
    """
    weights = torch.cuda.memory_allocated(device) - experts_nbytes
    workspace = workspace_nbytes(config, layer)
    return weights + kv_nbytes(config) + draft_nbytes(config) + workspace + CONTEXT_NBYTES


def kv_nbytes(config: Any) -> int:
    """KV cache: as given, else for up to four sequences of the greatest length."""
    given = getattr(config.cache_config, "kv_cache_memory_bytes", None)
    if given:
        return int(given)
    return _kv_nbytes(config, config.model_config, config.parallel_config)


def draft_nbytes(config: Any) -> int:
    """Weights and KV cache of the model that guesses tokens, which vLLM loads after ours.

    Raises:
        ConfigError: they cannot be known before it is loaded.
    """
    speculation = getattr(config, "speculative_config", None)
    if speculation is None or speculation.method in WITHOUT_MODEL:
        return 0
    model, parallel = speculation.draft_model_config, speculation.draft_parallel_config
    name = getattr(model, "model", "?")
    weights = sum(file.stat().st_size for file in Path(name).glob("*.safetensors"))
    if speculation.method == "mtp" or not weights or model.get_num_experts():
        raise ConfigError(
            f"{flag('size')} auto and {flag('gib')} cannot tell what the draft model {name} "
            f"({speculation.method}) will take: give {flag('size')} N; a draft model without "
            "experts may also be a folder with .safetensors files"
        )
    weights //= parallel.tensor_parallel_size
    given = getattr(config.cache_config, "kv_cache_memory_bytes", None)
    return weights + (0 if given else _kv_nbytes(config, model, parallel))


def _kv_nbytes(config: Any, model: Any, parallel: Any) -> int:
    """Of one model, for as many tokens as ours can hold."""
    most = config.model_config.max_model_len
    num_tokens = most * min(config.scheduler_config.max_num_seqs, NUM_SEQUENCES)
    heads = model.get_num_kv_heads(parallel) * model.get_head_size()
    itemsize = config.model_config.dtype.itemsize
    return int(2 * num_tokens * heads * model.get_num_layers(parallel) * itemsize)


def workspace_nbytes(config: Any, layer: Any) -> int:
    """Activations of the largest step: rows of pairs in MoE layers, tokens, and logits."""
    scheduler, model = config.scheduler_config, config.model_config
    return step_nbytes(
        scheduler.max_num_batched_tokens,
        scheduler.max_num_seqs,
        top_k=layer.top_k,
        hidden_size=layer.hidden_size,
        expert_width=layer.intermediate_size_per_partition,
        vocab_size=model.get_vocab_size(),
        itemsize=model.dtype.itemsize,
    )


class HostBudget:
    """Adds up experts as vLLM creates them, untouched, before it loads a single one.

    Args:
        num_ranks: processes that each hold as much in this host's memory.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._available = available_host_bytes()
        self._needed = 0

    def add(self, nbytes: int) -> None:
        """So many bytes more.

        Raises:
            HostMemoryError: they are more than the host had to begin with.
        """
        self._needed += nbytes * self._num_ranks
        if self._needed > self._available:
            raise HostMemoryError(
                f"the experts need more than {format_bytes(self._needed)} of host memory, "
                f"{format_bytes(self._available)} is available: free memory, or take a model of "
                "fewer bits; where memory grows on demand, skip this check by "
                f"{flag('options')} '{{\"check_host_memory\": false}}'"
            )


def num_ranks_here(parallel: Any) -> int:
    """Processes that hold experts in this host's memory."""
    local = getattr(parallel, "local_world_size", parallel.world_size)
    return int(local * max(1, getattr(parallel, "data_parallel_size_local", 1)))
