"""A checkpoint's sizes from its configuration and the headers of its files; no weights are read."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotexperts.errors import CheckpointError, UnsupportedModelError
from hotexperts.sizing import LayerShape

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
_ROW_ALIGNMENT_BYTES = 256
_KV_ITEM_BYTES = 2
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a forecast must know of a model.

    Attributes:
        name: as given.
        layers: its MoE layers.
        other_nbytes: weights that are no routed experts.
        expert_nbytes: routed experts, all of them.
        kv_nbytes_per_token: keys and values of all layers, in 16 bits.
        num_layers: layers with attention.
        is_quantised: the experts are stored in fewer than 16 bits.
        max_positions: tokens that a sequence may have; None: the configuration does not say.
    """

    name: str
    layers: tuple[LayerShape, ...]
    other_nbytes: int
    expert_nbytes: int
    kv_nbytes_per_token: int
    num_layers: int
    is_quantised: bool
    max_positions: int | None = None


def read_facts(folder: Path) -> ModelFacts:
    """The facts of a checkpoint in safetensors.

    Raises:
        CheckpointError: no such folder, no configuration, no safetensors, or a damaged file.
        UnsupportedModelError: no Mixture-of-Experts model.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder: give one with config.json and .safetensors files"
        )
    config = _config(folder)
    num_experts, top_k = _first(config, _NUM_EXPERTS), _first(config, _TOP_K)
    if not num_experts or not top_k:
        raise UnsupportedModelError(
            f"{folder} is no Mixture-of-Experts model: its config.json has none of "
            f"{', '.join(_NUM_EXPERTS)} with {', '.join(_TOP_K)}"
        )
    sizes = dict(_tensors(folder))
    per_layer = _experts_by_layer(sizes)
    if not per_layer:
        raise UnsupportedModelError(f"{folder} has no tensors called '...layers.N...experts...'")
    shapes = tuple(_shape(nbytes, num_experts, top_k) for nbytes in per_layer.values())
    experts = sum(per_layer.values())
    return ModelFacts(
        name=str(folder),
        layers=shapes,
        other_nbytes=sum(sizes.values()) - experts,
        expert_nbytes=experts,
        kv_nbytes_per_token=_kv_nbytes(config),
        num_layers=int(config["num_hidden_layers"]),
        is_quantised="quantization_config" in config,
        max_positions=_first(config, ("max_position_embeddings",)) or None,
    )


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no object")
    text = config.get("text_config")
    merged = config | text if isinstance(text, dict) else config
    if not isinstance(merged.get("num_hidden_layers"), int):
        raise CheckpointError(f"{path} has no num_hidden_layers")
    return merged


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((int(config[n]) for n in names if isinstance(config.get(n), int)), 0)


def _tensors(folder: Path) -> Iterator[tuple[str, int]]:
    """Names and bytes of all tensors."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no .safetensors: pickle and GGUF are not read")
    for path in files:
        for name, entry in _header(path).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield name, end - begin


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MOST_HEADER_BYTES:
                raise CheckpointError(f"{path} is damaged: its header would take {length} bytes")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is damaged: its header is no object")
    return header


def _experts_by_layer(sizes: Mapping[str, int]) -> dict[int, int]:
    """Bytes of the routed experts of each layer that has some."""
    found: dict[int, int] = {}
    for name, nbytes in sizes.items():
        layer = _LAYER.search(name)
        if layer is not None and ".experts." in name and "shared" not in name:
            found[int(layer[1])] = found.get(int(layer[1]), 0) + nbytes
    return dict(sorted(found.items()))


def _shape(layer_nbytes: int, num_experts: int, top_k: int) -> LayerShape:
    row = -(-layer_nbytes // num_experts)
    aligned = -(-row // _ROW_ALIGNMENT_BYTES) * _ROW_ALIGNMENT_BYTES
    return LayerShape(num_experts, top_k, aligned)


def _kv_nbytes(config: Mapping[str, Any]) -> int:
    layers = int(config["num_hidden_layers"])
    if config.get("kv_lora_rank"):  # one latent for all heads
        width = int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0)
    else:
        heads = int(config.get("num_attention_heads") or 1)
        head_dim = int(config.get("head_dim") or int(config.get("hidden_size") or 0) // heads)
        width = 2 * int(config.get("num_key_value_heads") or heads) * head_dim
    return layers * width * _KV_ITEM_BYTES
