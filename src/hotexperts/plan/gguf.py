"""The headers of GGUF files, read by the `gguf` package: it maps a file, and no tensor is touched.

A file may be split: `NAME-00001-of-00003.gguf` and so on; the first says what the model is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hotexperts.errors import CheckpointError
from hotexperts.plan.config import Config
from hotexperts.plan.model import TensorSize

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL | re.ASCII)
_MOST_FILES = 1000
_MOST_READS = 1 << 23  # of a header: the largest vocabularies take 2 million
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
    headers = [_read(part) for part in _parts(path)]
    sizes: dict[str, TensorSize] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in sizes:
                raise CheckpointError(f"{path}: damaged: two tensors are called {tensor.name:.80}")
            sizes[tensor.name] = TensorSize(tensor.tensor_type.name, int(tensor.n_bytes))
    return Config(str(path), _values(path, headers[0])), sizes


def _parts(path: Path) -> list[Path]:
    """All files of the model, in order."""
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    stem, count = found[1], int(found[3])
    if not 1 <= int(found[2]) <= count <= _MOST_FILES:
        raise CheckpointError(f"{path}: no part of a split file has such a name")
    parts = [path.with_name(f"{stem}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of {count} parts, {missing[0]} first: is the "
            "download complete?"
        )
    return parts


def _read(path: Path) -> Any:
    from gguf import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc]
        """Refuses what lies beyond the file's end, where the package would go on with nothing."""

        num_reads = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **more: Any) -> Any:
            self.num_reads += 1
            if self.num_reads > _MOST_READS:
                raise ValueError("its header has no end")
            wanted = int(count)
            found = super()._get(offset, dtype, count, *rest, **more)
            if len(found) != wanted:
                raise ValueError(f"it ends before byte {offset + wanted}")
            return found

    try:
        return Reader(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: damaged or not GGUF ({error!r:.120}): download it again"
        ) from error


def _values(path: Path, header: Any) -> dict[str, Any]:
    """The configuration, as far as the file has one."""
    try:
        prefix = _value(header, "general.architecture")
        found = {name: _value(header, f"{prefix}.{key}") for name, key in _NAMES.items()}
        tokens = header.get_field("tokenizer.ggml.tokens")
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged: {error!r:.120}") from error
    if prefix is None:
        raise CheckpointError(f"{path} does not say of which architecture it is")
    if found["vocab_size"] is None and tokens is not None:
        found["vocab_size"] = len(tokens.data)
    return {name: _mean(value) for name, value in found.items() if value not in (None, 0)}


def _value(header: Any, key: str) -> Any:
    found = header.get_field(key)
    return None if found is None else found.contents()


def _mean(value: Any) -> Any:
    """Where each layer has its own number, their mean, rounded up."""
    if isinstance(value, list) and value and all(type(number) is int for number in value):
        return -(-sum(value) // len(value))
    return value
