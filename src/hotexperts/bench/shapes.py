"""Well-known models' shapes with random weights, for speed without a download.

Sizes are those of the configurations that the models are published with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotexperts.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """A model without its weights.

    Attributes:
        model_type: Transformers' name of its family.
        sizes: what its configuration says.
        num_experts: of each MoE layer.
        top_k: experts a token.
        num_dense: layers at the beginning that have no routed experts.
    """

    model_type: str
    sizes: Mapping[str, Any]
    num_experts: int
    top_k: int
    num_dense: int = 0

    def cut(self, num_layers: int | None) -> Shape:
        """The same with fewer layers.

        Raises:
            ConfigError: more than there are, or none with experts.
        """
        most = self.sizes["num_hidden_layers"]
        if num_layers is None:
            return self
        if not self.num_dense < num_layers <= most:
            raise ConfigError(f"--layers {num_layers}: give {self.num_dense + 1} to {most}")
        sizes = {**self.sizes, "num_hidden_layers": num_layers}
        return Shape(self.model_type, sizes, self.num_experts, self.top_k, self.num_dense)


SHAPES: dict[str, Shape] = {
    "OLMoE-1B-7B": Shape(
        "olmoe",
        {
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "vocab_size": 50304,
        },
        num_experts=64,
        top_k=8,
    ),
    "Qwen3-30B-A3B": Shape(
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
        },
        num_experts=128,
        top_k=8,
    ),
    "Mixtral-8x7B": Shape(
        "mixtral",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
        },
        num_experts=8,
        top_k=2,
    ),
    "DeepSeek-V2-Lite": Shape(
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "vocab_size": 102400,
            "max_position_embeddings": 4096,
        },
        num_experts=64,
        top_k=6,
        num_dense=1,
    ),
}


def find_shape(name: str, num_layers: int | None) -> tuple[str, Shape]:
    """A shape by its name, in any case; with the name as it is written here.

    Raises:
        ConfigError: no such shape, or layers that it cannot have.
    """
    known = {each.lower(): each for each in SHAPES}.get(name.lower())
    if known is None:
        raise ConfigError(f"--shape {name!r:.60}: give one of {', '.join(SHAPES)}")
    return known, SHAPES[known].cut(num_layers)
