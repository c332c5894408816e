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
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d{1,6})\.", re.ASCII)
_IS_EXPERT = re.compile(r"\.experts\.|\.block_sparse_moe\.(?:in|out)put_linear\.")
_EXPERT = re.compile(r"\.experts\.(\d{1,6})\.", re.ASCII)
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
        num_heads: of attention; 0: the configuration does not say.
        kv_parts: into how many parts ranks can divide keys and values.
        expert_width: columns of an expert's first matrices; 0: the configuration does not say.
        expert_width_multiple: that a part of them must be, for the scales of its blocks.
    """

    name: str
    layers: tuple[LayerShape, ...]
    other_nbytes: int
    expert_nbytes: int
    kv_nbytes_per_token: int
    num_layers: int
    is_quantised: bool
    max_positions: int | None = None
    num_heads: int = 0
    kv_parts: int = 1
    expert_width: int = 0
    expert_width_multiple: int = 1


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
    config = _Config(folder / "config.json")
    num_experts, top_k = config.first(_NUM_EXPERTS), config.first(_TOP_K)
    if num_experts is None or top_k is None:
        raise UnsupportedModelError(
            f"{folder} is no Mixture-of-Experts model: its config.json has none of "
            f"{', '.join(_NUM_EXPERTS)} with {', '.join(_TOP_K)}"
        )
    sizes = dict(_tensors(folder))
    per_layer = _experts_by_layer(sizes)
    if not per_layer or not all(per_layer.values()):
        raise UnsupportedModelError(f"{folder} has no tensors called '...layers.N...experts...'")
    _check_experts(folder, sizes, num_experts)
    experts = sum(per_layer.values())
    return ModelFacts(
        name=str(folder),
        layers=tuple(_shape(nbytes, num_experts, top_k) for nbytes in per_layer.values()),
        other_nbytes=sum(sizes.values()) - experts,
        expert_nbytes=experts,
        kv_nbytes_per_token=_kv_nbytes(config),
        num_layers=config.count("num_hidden_layers"),
        is_quantised="quantization_config" in config.values,
        max_positions=config.first(("max_position_embeddings",)),
        num_heads=config.first(("num_attention_heads",)) or 0,
        kv_parts=_kv_parts(config),
        expert_width=config.first(_EXPERT_WIDTH) or 0,
        expert_width_multiple=_block_columns(config),
    )


class _Config:
    """A configuration, that of its text part where it has several, whose numbers are checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            config = json.loads(path.read_text())
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is no JSON: {error}") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{path} holds no object")
        text = config.get("text_config")
        self.values: dict[str, Any] = config | text if isinstance(text, dict) else config

    def first(self, names: tuple[str, ...]) -> int | None:
        """The first of these that is there, at least 1."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if type(value) is not int or not 1 <= value < 2**31:
                raise CheckpointError(f"{self.path}: {name} is {value!r:.60}: a count was wanted")
            return value
        return None

    def count(self, name: str) -> int:
        """A number that must be there."""
        found = self.first((name,))
        if found is None:
            raise CheckpointError(f"{self.path} has no {name}")
        return found


def _tensors(folder: Path) -> Iterator[tuple[str, int]]:
    """Names and bytes of all tensors."""
    for path in _files(folder):
        for name, entry in _header(path).items():
            if name != "__metadata__":
                yield name, _nbytes(path, name, entry)


def _files(folder: Path) -> list[Path]:
    """The checkpoint's files: those that its index names, else all but a second form of them."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        files = [p for p in files if not p.name.startswith("consolidated")] or files
        if not files:
            raise CheckpointError(f"{folder} has no .safetensors: pickle and GGUF are not read")
        return files
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        files = [folder / name for name in sorted(names)]
    except OSError as error:
        raise CheckpointError(f"cannot read {index}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is damaged: {error!r:.80}") from error
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(files)} files, {missing[0]} first: is its "
            "download complete?"
        )
    return files


def _nbytes(path: Path, name: str, entry: Any) -> int:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    begin, end = offsets if isinstance(offsets, list) and len(offsets) == 2 else (None, None)
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise CheckpointError(
            f"{path} is damaged: tensor {name:.80} lies at {offsets!r:.60}, not from a byte to a "
            "later one"
        )
    return end - begin


def _header(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is no file")
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MOST_HEADER_BYTES:
                raise CheckpointError(f"{path} is damaged: its header would take {length} bytes")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is damaged: its header is no object")
    return header


def _check_experts(folder: Path, sizes: Mapping[str, int], num_experts: int) -> None:
    """Where experts have numbers, whether they are as many as the configuration says."""
    numbers = [int(found[1]) for name in sizes if (found := _EXPERT.search(name))]
    if numbers and max(numbers) + 1 != num_experts:
        raise CheckpointError(
            f"{folder}: config.json says {num_experts} experts, the files have "
            f"{max(numbers) + 1}: is the checkpoint whole, and is this its configuration?"
        )


def _experts_by_layer(sizes: Mapping[str, int]) -> dict[int, int]:
    """Bytes of the routed experts of each layer that has some."""
    found: dict[int, int] = {}
    for name, nbytes in sizes.items():
        layer = _LAYER.search(name)
        if layer is not None and _IS_EXPERT.search(name) and "shared" not in name:
            found[int(layer[1])] = found.get(int(layer[1]), 0) + nbytes
    return dict(sorted(found.items()))


def _shape(layer_nbytes: int, num_experts: int, top_k: int) -> LayerShape:
    row = -(-layer_nbytes // num_experts)
    aligned = -(-row // _ROW_ALIGNMENT_BYTES) * _ROW_ALIGNMENT_BYTES
    return LayerShape(num_experts, top_k, aligned)


def _block_columns(config: _Config) -> int:
    """Columns that share a scale of fp8 in blocks; 1 of other weights."""
    quantisation = config.values.get("quantization_config")
    block = quantisation.get("weight_block_size") if isinstance(quantisation, dict) else None
    found = block[0] if isinstance(block, list) and block else 1
    if type(found) is not int or found < 1:
        raise CheckpointError(f"{config.path}: weight_block_size is {block!r:.60}: no counts")
    return found


def _kv_parts(config: _Config) -> int:
    """Heads of keys and values; one latent for all heads is every rank's."""
    if config.first(("kv_lora_rank",)) is not None:
        return 1
    return config.first(("num_key_value_heads",)) or config.count("num_attention_heads")


def _kv_nbytes(config: _Config) -> int:
    layers, rank = config.count("num_hidden_layers"), config.first(("kv_lora_rank",))
    if rank is not None:  # one latent for all heads
        width = rank + (config.first(("qk_rope_head_dim",)) or 0)
    else:
        heads = config.count("num_attention_heads")
        head_dim = config.first(("head_dim",)) or config.count("hidden_size") // heads
        width = 2 * (config.first(("num_key_value_heads",)) or heads) * head_dim
    return layers * width * _KV_ITEM_BYTES
