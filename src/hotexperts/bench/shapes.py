"""Well-known models' shapes with random weights, for speed without a download.

Most are measured in Transformers; those whose experts are quantised in vLLM, which has kernels for
them. Sizes are those of the configurations that the models are published with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
        quantization: of the experts, by vLLM's name.
    """

    model_type: str
    sizes: Mapping[str, Any]
    num_experts: int
    top_k: int
    num_dense: int = 0
    quantization: str | None = None

    @property
    def is_of_vllm(self) -> bool:
        """Whether it is measured there: its sizes name vLLM's class of the model."""
        return "architectures" in self.sizes

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
        if "layer_types" in sizes:
            sizes["layer_types"] = sizes["layer_types"][:num_layers]
        return replace(self, sizes=sizes)


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


def _gpt_oss(num_layers: int, num_experts: int) -> Shape:
    """As vLLM reads its configuration; attention and routers are not quantised."""
    sizes = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": num_layers,
        "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2),
        "sliding_window": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": num_experts,
        "num_experts": num_experts,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 7.0,
        "hidden_act": "silu",
        "attention_bias": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }
    return Shape("gpt_oss", sizes, num_experts, top_k=4, quantization="mxfp4")


VLLM_SHAPES: dict[str, Shape] = {
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}


def find_shape(name: str, num_layers: int | None) -> tuple[str, Shape]:
    """A shape by its name, in any case; with the name as it is written here.

    Raises:
        ConfigError: no such shape, or layers that it cannot have.
    """
    known = {**SHAPES, **VLLM_SHAPES}
    found = {each.lower(): each for each in known}.get(name.lower())
    if found is None:
        raise ConfigError(f"--shape {name!r:.60}: give one of {', '.join(known)}")
    return found, known[found].cut(num_layers)
