"""What a forecast must know of a model: from its configuration and the sizes of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hotexperts.errors import CheckpointError, UnsupportedModelError
from hotexperts.plan.config import Config
from hotexperts.sizing import LayerShape

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_WIDTH = (
    "moe_intermediate_size",
    "expert_intermediate_size",
    "intermediate_size",
    "ffn_hidden_size",
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h|blk)\.(\d{1,6})\.", re.ASCII)
_IS_EXPERT = re.compile(r"\.experts\.|\.block_sparse_moe\.(?:in|out)put_linear\.|_exps\.")
_EXPERT = re.compile(r"\.experts\.(\d{1,6})\.", re.ASCII)
_ROW_ALIGNMENT_BYTES = 256
_KV_ITEM_BYTES = 2


class TensorSize(NamedTuple):
    """A tensor's kind of numbers, as its file calls it, and its bytes."""

    kind: str
    nbytes: int


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
        hidden_size: numbers of a token between layers.
        expert_width: numbers of a token inside an expert.
        vocab_size: tokens that there are.
        is_quantised: the experts are stored in fewer than 16 bits.
        is_gguf: nothing here runs it.
        max_positions: tokens that a sequence may have; None: the configuration does not say.
        num_heads: of attention; 0: the configuration does not say.
        kv_parts: into how many parts ranks can divide keys and values.
        expert_width_multiple: that a part of them must be, for the scales of its blocks.
        expert_kinds: bytes of routed experts by their kind of numbers, most first.
    """

    name: str
    layers: tuple[LayerShape, ...]
    other_nbytes: int
    expert_nbytes: int
    kv_nbytes_per_token: int
    num_layers: int
    hidden_size: int
    expert_width: int
    vocab_size: int
    is_quantised: bool = False
    is_gguf: bool = False
    max_positions: int | None = None
    num_heads: int = 0
    kv_parts: int = 1
    expert_width_multiple: int = 1
    expert_kinds: dict[str, int] = field(default_factory=dict)


def facts_of(
    name: str, config: Config, sizes: Mapping[str, TensorSize], *, is_gguf: bool = False
) -> ModelFacts:
    """The facts.

    Args:
        name: of the model, for people and commands.
        config: with the names of Transformers.
        sizes: every tensor of the checkpoint.
        is_gguf: see `ModelFacts`.

    Raises:
        CheckpointError: configuration and tensors do not agree, or a count is missing.
        UnsupportedModelError: no Mixture-of-Experts model.
    """
    num_experts, top_k = config.first(_NUM_EXPERTS), config.first(_TOP_K)
    if num_experts is None or top_k is None:
        raise UnsupportedModelError(
            f"{name} is no Mixture-of-Experts model ({config.place} has none of "
            f"{', '.join(_NUM_EXPERTS)} with {', '.join(_TOP_K)}): give one that is"
        )
    per_layer, kinds = _experts(sizes)
    if not per_layer or not all(per_layer.values()):
        wanted = "blk.N...exps" if is_gguf else "...layers.N...experts..."
        raise UnsupportedModelError(
            f"{name} has no tensors called '{wanted}': give a checkpoint that names them so"
        )
    _check_experts(config, sizes, num_experts)
    experts = sum(per_layer.values())
    return ModelFacts(
        name=name,
        layers=tuple(_shape(nbytes, num_experts, top_k) for nbytes in per_layer.values()),
        other_nbytes=sum(size.nbytes for size in sizes.values()) - experts,
        expert_nbytes=experts,
        kv_nbytes_per_token=_kv_nbytes(config),
        num_layers=config.count("num_hidden_layers"),
        hidden_size=config.count("hidden_size"),
        expert_width=config.count(*_WIDTH),
        vocab_size=config.count("vocab_size"),
        is_quantised="quantization_config" in config.values,
        is_gguf=is_gguf,
        max_positions=config.first(("max_position_embeddings",)),
        num_heads=config.first(("num_attention_heads",)) or 0,
        kv_parts=_kv_parts(config),
        expert_width_multiple=_block_columns(config),
        expert_kinds=kinds,
    )


def _check_experts(config: Config, sizes: Mapping[str, TensorSize], num_experts: int) -> None:
    """Where experts have numbers, whether they are as many as the configuration says."""
    numbers = [int(found[1]) for name in sizes if (found := _EXPERT.search(name))]
    if numbers and max(numbers) + 1 != num_experts:
        raise CheckpointError(
            f"{config.place} says {num_experts} experts, the files have "
            f"{max(numbers) + 1}: download both again"
        )


def _experts(sizes: Mapping[str, TensorSize]) -> tuple[dict[int, int], dict[str, int]]:
    """Bytes of the routed experts of each layer that has some, and of each kind of numbers."""
    layers: dict[int, int] = {}
    kinds: dict[str, int] = {}
    for name, (kind, nbytes) in sizes.items():
        layer = _LAYER.search(name)
        if layer is not None and _IS_EXPERT.search(name) and "shared" not in name:
            layers[int(layer[1])] = layers.get(int(layer[1]), 0) + nbytes
            kinds[kind] = kinds.get(kind, 0) + nbytes
    return dict(sorted(layers.items())), dict(sorted(kinds.items(), key=lambda item: -item[1]))


def _shape(layer_nbytes: int, num_experts: int, top_k: int) -> LayerShape:
    row = -(-layer_nbytes // num_experts)
    aligned = -(-row // _ROW_ALIGNMENT_BYTES) * _ROW_ALIGNMENT_BYTES
    return LayerShape(num_experts, top_k, aligned)


def _block_columns(config: Config) -> int:
    """Columns that share a scale of fp8 in blocks; 1 of other weights."""
    quantisation = config.values.get("quantization_config")
    block = quantisation.get("weight_block_size") if isinstance(quantisation, dict) else None
    found = block[0] if isinstance(block, list) and block else 1
    if type(found) is not int or found < 1:
        raise CheckpointError(
            f"{config.place}: weight_block_size is {block!r:.60}: counts were wanted: download it "
            "again"
        )
    return found


def _kv_parts(config: Config) -> int:
    """Heads of keys and values; one latent for all heads is every rank's."""
    if config.first(("kv_lora_rank",)) is not None:
        return 1
    return config.first(("num_key_value_heads",)) or config.count("num_attention_heads")


def _kv_nbytes(config: Config) -> int:
    layers, rank = config.count("num_hidden_layers"), config.first(("kv_lora_rank",))
    if rank is not None:  # one latent for all heads
        width = rank + (config.first(("qk_rope_head_dim",)) or 0)
    else:
        heads = config.count("num_attention_heads")
        head_dim = config.first(("head_dim",)) or config.count("hidden_size") // heads
        width = 2 * (config.first(("num_key_value_heads",)) or heads) * head_dim
    return layers * width * _KV_ITEM_BYTES
