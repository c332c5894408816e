"""Small models as GGUF files, written by the `gguf` package, and the plain ones they stand for.

The names are llama.cpp's, written out, and the numbers those of the package's own dequantisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS, TOP_K, LAYERS = 6, 2, 2
ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
TOKENS = [*sorted(ByteLevel.alphabet()), "ab", "cd", "<|end|>"]
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
Kinds = Mapping[str, str]


def build(
    folder: Path,
    experts: str | Kinds = "Q8_0",
    *,
    family: str = "qwen3_moe",
    others: str = "F16",
    dtype: torch.dtype = torch.bfloat16,
    width: int = 64,
    split: int = 0,
    ties: bool = False,
    without: tuple[str, ...] = (),
    has_tokenizer: bool = True,
    **changes: Any,
) -> tuple[Path, Path]:
    """The file, and the folder of the plain checkpoint.

    Args:
        folder: for both.
        experts: the type of their tensors; of gate, up and down.
        family: `model_type`.
        others: the type of the other matrices; vectors are F32.
        dtype: of the plain checkpoint.
        width: of the hidden state, and half of it of an expert.
        split: tensors of a file; 0 is all.
        ties: the embedding is the head.
        without: keys and tensors that the file lacks.
        has_tokenizer: it has one.
        **changes: of keys after the architecture's name; tensors with a dot in theirs.
    """
    model = _model(family, width, ties)
    kinds = dict.fromkeys(("gate", "up", "down"), experts) if isinstance(experts, str) else experts
    path = folder / "gguf" / "m.gguf"
    path.parent.mkdir()
    writer = gguf.GGUFWriter(path, ARCHITECTURES[family], split_max_tensors=split)
    _write_keys(writer, model.config, without, changes)
    if has_tokenizer:
        _write_tokenizer(writer)
    for name, parameter, part in _parameters(model):
        if name in without:
            continue
        is_expert = name.endswith("_exps.weight")
        kind = kinds[name.split("_")[1]] if is_expert else others
        kind = "F32" if parameter.dim() == 1 or "gate_inp" in name else kind
        data, numbers = quantised(part.detach().numpy(), kind)
        part.data.copy_(torch.from_numpy(numbers))
        if name.endswith("gate_inp_shexp.weight"):
            data = data.reshape(-1)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    for name, kind in changes.items():
        if "." in name and not isinstance(kind, int | str):
            writer.add_tensor(name, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain = folder / "plain"
    model.to(dtype).save_pretrained(plain)
    return path, plain


def quantised(numbers: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """What a file has, and the numbers that it means, float32."""
    number = gguf.GGMLQuantizationType[kind]
    if kind == "Q4_K":  # which the package does not write
        data = _drawn_q4_k(numbers.shape)
    else:
        data = gguf.quantize(numbers, number)
    return data, gguf.dequantize(data, number).reshape(numbers.shape)


def _drawn_q4_k(shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of 256 numbers in 144 bytes: two scales in fp16, then anything."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, 144), np.uint8)
    scales = rng.uniform(0.0001, 0.0004, (*blocks.shape[:-1], 2)).astype(np.float16)
    blocks[..., :4] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _model(family: str, width: int, ties: bool) -> Any:
    shared = {"shared_expert_intermediate_size": width, "qkv_bias": True}
    head = {"head_dim": 32, "norm_topk_prob": True}
    config = AutoConfig.for_model(
        family,
        vocab_size=len(TOKENS),
        hidden_size=width,
        intermediate_size=2 * width,
        moe_intermediate_size=width // 2,
        num_hidden_layers=LAYERS,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=ties,
        eos_token_id=len(TOKENS) - 1,
        bos_token_id=None,
        pad_token_id=None,
        **_HEADS,
        **(shared if family == "qwen2_moe" else head),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape) * 0.1
            parameter.data = drawn + 1 if parameter.dim() == 1 else drawn
    return model.eval()


def _parameters(model: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The name in the file, the parameter, and its part of that name."""
    for key, parameter in model.named_parameters():
        _, _, rest = key.partition("model.layers.")
        layer, _, module = rest.partition(".")
        if module.startswith("mlp.experts"):
            parts = ("gate", "up") if "gate_up" in module else ("down",)
            pieces = parameter.chunk(len(parts), dim=1)
            for part, piece in zip(parts, pieces, strict=True):
                yield f"blk.{layer}.ffn_{part}_exps.weight", parameter, piece
            continue
        name, _, last = (module or key).rpartition(".")
        prefix = f"blk.{layer}." if module else ""
        yield f"{prefix}{_NAMES[name]}.{last}", parameter, parameter


def _write_keys(
    writer: Any, config: Any, without: tuple[str, ...], changes: Mapping[str, Any]
) -> None:
    keys = {
        "block_count": LAYERS,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 5000.0,
        "expert_count": EXPERTS,
        "expert_used_count": TOP_K,
    }
    if config.model_type == "qwen3_moe":
        keys["attention.key_length"] = config.head_dim
    architecture = ARCHITECTURES[config.model_type]
    of_ours = {name: value for name, value in changes.items() if isinstance(value, int | str)}
    for name, value in {**keys, **of_ours}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if name not in without:
            add[type(value)](f"{architecture}.{name}", value)


def _write_tokenizer(writer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 1) + [3])
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(len(TOKENS) - 1)
