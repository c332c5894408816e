"""What of the GPU's memory is not for slots, before vLLM has profiled; and what the host has."""

from __future__ import annotations

from typing import Any

import torch

from hotexperts.cache.host_memory import available_host_bytes
from hotexperts.config import Bytes, format_bytes
from hotexperts.errors import ConfigError, HostMemoryError
from hotexperts.integrations.vllm.options import flag

# CUDA context, its libraries, and captured graphs: 0.5 to 0.7 GB on an H200.
CONTEXT_NBYTES = 768 << 20
NUM_SEQUENCES = 4  # of the greatest length have room, unless vLLM is told another size
ROWS_PER_PAIR = 4  # two workspaces of vLLM's, the rows kept of all waves, and one more while added


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
    return weights + kv_nbytes(config) + workspace_nbytes(config, layer) + CONTEXT_NBYTES


def kv_nbytes(config: Any) -> int:
    """KV cache: as given, else for up to four sequences of the greatest length."""
    given = getattr(config.cache_config, "kv_cache_memory_bytes", None)
    if given:
        return int(given)
    model, parallel = config.model_config, config.parallel_config
    num_tokens = model.max_model_len * min(config.scheduler_config.max_num_seqs, NUM_SEQUENCES)
    heads = model.get_num_kv_heads(parallel) * model.get_head_size()
    return 2 * num_tokens * heads * model.get_num_layers(parallel) * model.dtype.itemsize


def workspace_nbytes(config: Any, layer: Any) -> int:
    """Activations of the largest step: rows of pairs in MoE layers, tokens, and logits."""
    scheduler, model = config.scheduler_config, config.model_config
    num_tokens, itemsize = scheduler.max_num_batched_tokens, model.dtype.itemsize
    width = max(layer.hidden_size, 2 * layer.intermediate_size_per_partition)
    pairs = ROWS_PER_PAIR * num_tokens * layer.top_k * width * itemsize
    tokens = 8 * num_tokens * layer.hidden_size * itemsize
    logits = 4 * scheduler.max_num_seqs * model.get_vocab_size() * 4  # float32, sorted for top-p
    return pairs + tokens + logits


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
