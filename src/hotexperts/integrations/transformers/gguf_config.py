"""The configuration of a GGUF file, by Transformers' table of keys; widths are those of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotexperts.errors import CheckpointError, ConfigError, UnsupportedModelError
from hotexperts.gguf_header import value
from hotexperts.integrations.transformers import compat
from hotexperts.integrations.transformers.gguf_checkpoint import ATTRIBUTE, Found
from hotexperts.integrations.transformers.gguf_weights import PLAIN

_MODEL_TYPES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
_OPTIONAL = ("feed_forward_length", "attention.key_length", "rope.freq_base", "vocab_size")
_DEFAULT_ROPE_THETA = 10000.0  # where the file has none
_WIDTHS = {  # of the configuration: whose last dimension in the first layer it is
    "moe_intermediate_size": "blk.0.ffn_down_exps.weight",
    "shared_expert_intermediate_size": "blk.0.ffn_down_shexp.weight",
}
_OF_THE_HUB = ("revision", "subfolder", "variant")


def read_gguf_config(path: Path, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The configuration that a file's keys and tensors give.

    Args:
        path: of the file, or of any part of a split one.
        options: `from_pretrained`'s; those named like a value of the configuration change it.

    Returns:
        The configuration, and the options that are still for `from_pretrained`.

    Raises:
        CheckpointError: damaged, or a key that is needed is missing.
        ConfigError: options of the hub.
        UnsupportedModelError: an architecture that is not read.
        ModuleNotFoundError: the `gguf` package is not installed.
    """
    from transformers import CONFIG_MAPPING

    unfit = [name for name in _OF_THE_HUB if options.get(name)]
    if unfit:
        raise ConfigError(f"{', '.join(unfit)}: {path} is a file on this machine: leave it out")
    found = Found.of(path)
    model_type = _model_type(found)
    values = {**_values(found, model_type), ATTRIBUTE: str(path), "dtype": _dtype(found)}
    return CONFIG_MAPPING[model_type].from_dict(values, return_unused_kwargs=True, **options)


def _model_type(found: Found) -> str:
    name = found.architecture
    if name not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"{found.parts[0]}: its architecture is {name!r:.80}, and in GGUF only "
            f"{', '.join(_MODEL_TYPES)} are read: take the model's safetensors"
        )
    return _MODEL_TYPES[name]


def _values(found: Found, model_type: str) -> dict[str, Any]:
    """The configuration's, by Transformers' names."""
    table, defaults = compat.gguf_tables(model_type)
    prefix = found.architecture
    values: dict[str, Any] = dict(defaults)
    for key, name in table.items():
        number = value(found.header, f"{prefix}.{key}")
        if name is not None and isinstance(number, list):
            raise UnsupportedModelError(
                f"{found.parts[0]}: {prefix}.{key} differs between layers, which is not read from "
                "GGUF: take the model's safetensors"
            )
        if name is not None and number is not None:
            values[name] = number
        elif name is not None and key not in _OPTIONAL:
            raise CheckpointError(
                f"{found.parts[0]}: lacks {prefix}.{key}: it is incomplete; download it again"
            )
    scaling = value(found.header, f"{prefix}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise UnsupportedModelError(
            f"{found.parts[0]}: its positions are scaled ({scaling!r:.40}), which is not read from "
            "GGUF: take the model's safetensors, or a file without scaling"
        )
    values.setdefault("rope_theta", _DEFAULT_ROPE_THETA)
    of_queries = _shape(found, "blk.0.attn_q.weight")[0]
    values.setdefault("head_dim", of_queries // values["num_attention_heads"])
    values["vocab_size"] = _shape(found, "token_embd.weight")[0]
    values["tie_word_embeddings"] = "output.weight" not in found.tensors
    for name, tensor in _WIDTHS.items():
        if tensor in found.tensors:
            values[name] = found.tensors[tensor].shape[-1]
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        values[f"{name}_token_id"] = value(found.header, f"tokenizer.ggml.{key}_token_id")
    return values


def _shape(found: Found, name: str) -> tuple[int, ...]:
    if name not in found.tensors:
        raise CheckpointError(
            f"{found.parts[0]}: has no tensor {name}: it is incomplete; download it again"
        )
    return found.tensors[name].shape


def _dtype(found: Found) -> Any:
    """The half dtype that the file has, where nothing is quantised; else bfloat16."""
    kinds = {tensor.kind.name for tensor in found.tensors.values()}
    if kinds <= set(PLAIN) and "BF16" not in kinds:
        return PLAIN["F16" if "F16" in kinds else "F32"]
    return PLAIN["BF16"]
