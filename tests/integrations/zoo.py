"""A zoo of tiny Mixture-of-Experts models: one random model a family, built without the network.

Every model has two decoder layers (Nemotron-H: four blocks, two of them MoE), eight routed experts
with top-2 routing, and widths that are multiples of 16 so that `grouped_mm` accepts them. Widths
differ (hidden 64, expert 48, vocabulary 96) so that a transposed or swapped tensor does not fit by
accident. Weights are drawn wide enough that one wrong expert shows in the logits.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

NUM_EXPERTS = 8
TOP_K = 2
VOCAB_SIZE = 96
HIDDEN_SIZE = 64
EXPERT_SIZE = 48
WEIGHT_STD = 0.15
FP8_BLOCK = 16
MXFP4_GROUP = 32

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]

_COMMON: Config = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": EXPERT_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_TOP_K: Config = {"num_experts_per_tok": TOP_K}
_PLAIN: Config = {"num_experts": NUM_EXPERTS, **_TOP_K}
_LOCAL: Config = {"num_local_experts": NUM_EXPERTS, **_TOP_K}
_WIDTH: Config = {"moe_intermediate_size": EXPERT_SIZE}
_ROUTED: Config = {"n_routed_experts": NUM_EXPERTS, **_TOP_K, **_WIDTH}
_SHARED: Config = {"shared_expert_intermediate_size": 32}
_HEAD: Config = {"head_dim": 16}
_GROUPS: Config = {"n_group": 2, "topk_group": 1}
_LINEAR: Config = {"layer_types": ["linear_attention", "full_attention"]}
_SLIDING: Config = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
_QWEN_LINEAR: Config = {
    **_LINEAR,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 32,
}
_MLA: Config = {
    **_ROUTED,
    **_GROUPS,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
}
_MAMBA2: Config = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_NEMOTRON: Config = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "moe_shared_expert_intermediate_size": 32,
    "moe_latent_size": 32,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "use_mamba_kernels": False,
}
_DEEPSEEK_V4: Config = {
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "hc_mult": 2,
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
    "mlp_layer_types": ["hash_moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "sliding_window": 16,
    "qk_rope_head_dim": 16,
}
_ERNIE: Config = {
    "moe_k": TOP_K,
    "moe_num_experts": NUM_EXPERTS,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 0,
    "moe_layer_end_index": 1,
}
_JAMBA: Config = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "use_mamba_kernels": False,
    "mamba_d_state": 8,
    "mamba_dt_rank": 8,
}
_GEMMA4: Config = {
    "enable_moe_block": True,
    "num_experts": NUM_EXPERTS,
    "top_k_experts": TOP_K,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
_LLAMA4: Config = {
    **_LOCAL,
    **_HEAD,
    "intermediate_size_mlp": 32,
    "interleave_moe_layer_step": 1,
    "attention_chunk_size": 64,
}

_INKLING: Config = {
    "n_shared_experts": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 16,
    "d_rel": 8,
    "rel_extent": 16,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "logits_mup_width_multiplier": 1.0,
}

_INKLING2: Config = {
    name: value
    for name, value in {**_ROUTED, **_HEAD, **_INKLING}.items()
    if name not in ("n_shared_experts", "logits_mup_width_multiplier")
}
_LOOP: Config = {
    "num_hidden_layers": 6,
    "layer_types": ["hybrid_sliding", "hybrid"] * 3,
    "loop_layer_index_start": 2,
    "loop_layer_index_end": 4,
    "loop_num_passes": 2,
    "loop_gate_rank": 8,
    "n_layers_per_attn_res_block": 2,
    "unpadded_vocab_size": VOCAB_SIZE,
}

_FAMILY_CONFIGS: dict[str, Config] = {
    "olmoe": _PLAIN,
    "mixtral": _LOCAL,
    "qwen2_moe": {**_PLAIN, **_WIDTH, **_SHARED},
    "qwen3_moe": {**_PLAIN, **_WIDTH, **_HEAD},
    "qwen3_next": {**_PLAIN, **_WIDTH, **_SHARED, **_QWEN_LINEAR},
    "deepseek_v2": {**_MLA, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_MLA, "first_k_dense_replace": 0},
    "gpt_oss": {**_LOCAL, **_HEAD},
    # The one family whose first layer is dense: layer numbers and MoE counts differ.
    "glm4_moe": {**_ROUTED, **_HEAD, "first_k_dense_replace": 1},
    "phimoe": _LOCAL,
    "granitemoe": _LOCAL,
    "granitemoeshared": {**_LOCAL, "shared_intermediate_size": 32},
    "granitemoehybrid": {**_LOCAL, **_LINEAR, **_MAMBA2, "shared_intermediate_size": 32},
    "jamba": {**_PLAIN, **_JAMBA},
    "nemotron_h": {**_ROUTED, **_HEAD, **_NEMOTRON},
    "minimax_m2": {**_LOCAL, **_HEAD},
    "ernie4_5_moe": {**_WIDTH, **_ERNIE},
    "hunyuan_v1_moe": {**_HEAD, "num_experts": NUM_EXPERTS, "moe_topk": TOP_K},
    "lfm2_moe": {
        **_PLAIN,
        **_WIDTH,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 0,
    },
    "dots1": {**_ROUTED, **_GROUPS, "n_shared_experts": 1},
    "flex_olmo": _PLAIN,
    "glm4_moe_lite": {**_MLA, "mlp_layer_types": ["sparse", "sparse"]},
    "qwen3_5_moe": {**_PLAIN, **_WIDTH, **_SHARED, **_QWEN_LINEAR},
    "afmoe": {
        **_PLAIN,
        **_WIDTH,
        **_HEAD,
        **_SLIDING,
        "num_dense_layers": 0,
        "num_shared_experts": 1,
    },
    "exaone_moe": {
        **_PLAIN,
        **_WIDTH,
        **_GROUPS,
        **_SLIDING,
        "mlp_layer_types": ["sparse", "sparse"],
    },
    "deepseek_v4": {**_ROUTED, **_DEEPSEEK_V4},
    "gemma4": {**_WIDTH, **_HEAD, **_SLIDING, **_GEMMA4},
    "minimax": {**_LOCAL, **_HEAD, **_LINEAR, "block_size": 16},
    "inkling": {**_ROUTED, **_HEAD, **_INKLING},
}
_MODEL_TYPES = {
    "gemma4": "gemma4_text",
    "inkling": "inkling_text",
    "llama4": "llama4_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}

# Too new for some supported Transformers, or no causal language model. All add up in float32.
OTHERS: dict[str, Config] = {
    "inkling2_text": _INKLING2,
    "inkling2_loop_text": {**_INKLING2, **_LOOP},
    "openai_privacy_filter": {**_LOCAL, **_HEAD, "num_labels": 5},
}

FAMILIES: tuple[str, ...] = tuple(_FAMILY_CONFIGS)


def model_type(family: str) -> str:
    """Returns `model_type` as the family's configuration says it."""
    return _MODEL_TYPES.get(family, family)


KNOWN_EXCEPTIONS: dict[tuple[str, str], str] = {
    ("deepseek_v4", "5.17"): (
        "bfloat16 only: its layer norms, kept in float32, hand float32 to bfloat16 linear layers "
        "(RuntimeError: expected m1 and m2 to have the same dtype)"
    ),
}
"""(family, Transformers minor version such as "5.17") -> why it cannot be tried there.

A cause that starts with "bfloat16 only" leaves the family usable in float32.
"""


def known_exception(family: str) -> str | None:
    """Returns why `family` cannot be tried on the installed Transformers, or None if it can."""
    minor = ".".join(transformers.__version__.split(".")[:2])
    return KNOWN_EXCEPTIONS.get((family, minor))


def build_model(
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    experts_implementation: str = "eager",
) -> PreTrainedModel:
    """Builds the tiny causal language model of one family, in evaluation mode.

    The same seed gives the same weights in every dtype, up to rounding. Torch's global generator
    is left as it was.

    Args:
        family: One of `FAMILIES`.
        seed: Seed of the weights.
        dtype: Dtype of the parameters; some families keep a few of theirs in float32.
        experts_implementation: Any implementation registered with Transformers.
    """
    return _build(
        family, _FAMILY_CONFIGS[family], seed, dtype, experts_implementation=experts_implementation
    )


def build_other(
    family: str, *, seed: int = 0, experts_implementation: str = "eager"
) -> PreTrainedModel:
    """Builds one of `OTHERS` in bfloat16, if the installed Transformers has it."""
    auto_class = AutoModelForCausalLM
    if family == "openai_privacy_filter":
        auto_class = transformers.AutoModelForTokenClassification
    return _build(
        family,
        OTHERS[family],
        seed,
        torch.bfloat16,
        auto_class,
        experts_implementation=experts_implementation,
    )


def build_llama4(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Builds a tiny text-only Llama 4, whose experts have no `experts_implementation`."""
    return _build("llama4", _LLAMA4, seed, dtype)


def save_checkpoint(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "50KB",
) -> Path:
    """Writes one family's model as a sharded safetensors checkpoint and returns the folder."""
    build_model(family, seed=seed, dtype=dtype).save_pretrained(
        folder, max_shard_size=max_shard_size
    )
    return folder


def build_fp8_checkpoint(folder: Path, *, seed: int = 0) -> Path:
    """Writes a Qwen3-MoE checkpoint in fine-grained fp8 and returns the folder.

    Every linear weight becomes `weight` (float8_e4m3fn) and `weight_scale_inv` (float32, one value
    a 16 x 16 block). Without a GPU, `from_pretrained` dequantizes it to bfloat16.
    """
    save_checkpoint("qwen3_moe", folder, seed=seed)
    rewrite_shards(folder, _quantize_fp8)
    _set_quantization(
        folder,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": ["lm_head"],
        },
    )
    return folder


def build_mxfp4_checkpoint(folder: Path, *, seed: int = 0) -> Path:
    """Writes a gpt-oss checkpoint with mxfp4 experts and returns the folder.

    Each expert projection becomes `*_blocks` (uint8 `[E, rows, groups, 16]`, two e2m1 values to
    the byte) and `*_scales` (uint8 `[E, rows, groups]`, exponents with bias 127), both random.
    """
    config = {**_FAMILY_CONFIGS["gpt_oss"], "intermediate_size": 3 * MXFP4_GROUP}
    model = _build("gpt_oss", config, seed, torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="50KB")
    generator = torch.Generator().manual_seed(seed)
    rewrite_shards(folder, lambda name, tensor: _mxfp4_like(name, tensor, generator))
    _set_quantization(
        folder,
        {
            "quant_method": "mxfp4",
            "dequantize": True,
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        },
    )
    return folder


def sample_ids(*, batch: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    """Returns random token ids `[batch, length]`, none of them the padding id."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB_SIZE, (batch, length), generator=generator)


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, module) of every module that Transformers' experts decorator made."""
    for name, module in model.named_modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            yield name, module


def _build(
    family: str,
    config: Config,
    seed: int,
    dtype: torch.dtype,
    auto_class: Any = AutoModelForCausalLM,
    **options: Any,
) -> PreTrainedModel:
    fields = {**_COMMON, **config}
    if "layers_block_type" in fields:
        del fields["num_hidden_layers"]  # derived, and refused when given
    built = AutoConfig.for_model(model_type(family), **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # initialisation, of what `_randomize` leaves alone
        model = auto_class.from_config(built, dtype=dtype, **options)
    _keep_in_float32(model)
    _randomize(model, torch.Generator().manual_seed(seed))
    return model.eval()


def _keep_in_float32(model: PreTrainedModel) -> None:
    """As `from_pretrained` does; `from_config` forgets it in Transformers 5.17."""
    kept = tuple(model._keep_in_fp32_modules_strict or ())
    for name, parameter in model.named_parameters():
        if any(part in name for part in kept):
            parameter.data = parameter.data.float()


@torch.no_grad()
def _randomize(model: nn.Module, generator: torch.Generator) -> None:
    """Redraws matrices, and moves vectors (norms, biases, decays) off their initial values."""
    biases = [(name, t) for name, t in model.named_buffers() if name.endswith("bias")]
    for name, tensor in [*model.named_parameters(), *biases]:
        noise = torch.randn(tensor.shape, generator=generator) * WEIGHT_STD
        is_matrix = tensor.dim() > 1 and not name.endswith(("A_log", "_bias"))
        tensor.copy_(noise if is_matrix else tensor + noise)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # DeepSeek-V4's hash routing: token id -> distinct experts
            draws = torch.rand(len(table), NUM_EXPERTS, generator=generator)
            table.copy_(draws.argsort(dim=-1)[:, : table.shape[1]])


def rewrite_shards(folder: Path, convert: Callable[[str, torch.Tensor], Tensors]) -> None:
    """Replaces each tensor of a sharded checkpoint by what `convert(name, tensor)` returns."""
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    weight_map: dict[str, str] = {}
    for shard in sorted(set(index["weight_map"].values())):
        converted: Tensors = {}
        for name, tensor in load_file(folder / shard).items():
            converted.update(convert(name, tensor))
        save_file(converted, folder / shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(converted, shard))
    index_file.write_text(json.dumps({**index, "weight_map": weight_map}))


def _set_quantization(folder: Path, quantization: Config) -> None:
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**config, "quantization_config": quantization}))


def _quantize_fp8(name: str, weight: torch.Tensor) -> Tensors:
    if not name.endswith("_proj.weight"):
        return {name: weight}
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    quantized = (blocks / scale[:, None, :, None]).reshape(rows, columns)
    return {name: quantized.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}


def _mxfp4_like(name: str, weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: weight}
    num_experts, columns, rows = weight.shape  # gpt-oss keeps its experts transposed
    groups = (num_experts, rows, columns // MXFP4_GROUP)
    blocks = torch.randint(0, 256, (*groups, MXFP4_GROUP // 2), generator=generator)
    scales = torch.randint(121, 123, groups, generator=generator)  # values up to 6 * 2**-5
    return {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
