"""A model's facts from the headers of GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotexperts.errors import CheckpointError
from hotexperts.gguf_header import read_headers, value
from hotexperts.plan.config import Config
from hotexperts.plan.model import TensorSize

_COUNT = 4  # the part of a list that has its length
_NAMES = {  # Transformers': GGUF's, after the architecture
    "num_hidden_layers": "block_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "hidden_size": "embedding_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "intermediate_size": "feed_forward_length",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
}


def read_gguf(path: Path) -> tuple[Config, dict[str, TensorSize]]:
    """The configuration, in the names of Transformers, and every tensor.

    Raises:
        CheckpointError: missing, truncated or damaged.
        ModuleNotFoundError: the package is not installed.
    """
    headers = read_headers(path)
    sizes = {
        tensor.name: TensorSize(tensor.tensor_type.name, int(tensor.n_bytes))
        for header in headers
        for tensor in header.tensors
    }
    return Config(str(path), _values(path, headers[0])), sizes


def _values(path: Path, header: Any) -> dict[str, Any]:
    """The configuration, as far as the file has one."""
    try:
        prefix = value(header, "general.architecture")
        found = {name: value(header, f"{prefix}.{key}") for name, key in _NAMES.items()}
        tokens = header.get_field("tokenizer.ggml.tokens")
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({error!r:.120}): download it again") from error
    if prefix is None:
        raise CheckpointError(f"{path} does not say of which architecture it is: download it again")
    if found["vocab_size"] is None and tokens is not None:
        found["vocab_size"] = int(tokens.parts[_COUNT][0])
    return {name: _mean(number) for name, number in found.items() if number not in (None, 0)}


def _mean(value: Any) -> Any:
    """Where each layer has its own number, their mean, rounded up."""
    if isinstance(value, list) and value and all(type(number) is int for number in value):
        return -(-sum(value) // len(value))
    return value
