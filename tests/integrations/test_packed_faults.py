"""Faulty checkpoints of GPTQ, AWQ and compressed-tensors: refused by the tensor or field's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hotexperts.transformers as hot
from hotexperts.errors import CheckpointError
from integrations import packed_checkpoints as packed
from integrations import zoo
from integrations.packed_checkpoints import FORMATS, SHUFFLED

pytestmark = pytest.mark.transformers


def load(path: Path) -> Any:
    return hot.load(path, expert_cache_size=3, device="cpu", experts_algorithm="eager")


def edited(
    folder: Path, module: str, change: Callable[[dict[str, torch.Tensor]], dict[str, Any]]
) -> None:
    """Changes what one weight is made of."""
    parts: dict[str, torch.Tensor] = {}
    prefix = f"{module}."

    def collect(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if name.startswith(prefix):
            parts[name.removeprefix(prefix)] = tensor
        return {name: tensor}

    zoo.rewrite_shards(folder, collect)
    new = {k: v.contiguous() for k, v in change(dict(parts)).items()}

    def replaced(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.startswith(prefix):
            return {name: tensor}
        found = {f"{prefix}{k}": v for k, v in new.items()}
        new.clear()
        return found

    zoo.rewrite_shards(folder, replaced)


def without(name: str) -> Any:
    return lambda parts: {k: v for k, v in parts.items() if k != name}


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda parts: {**parts, name: change(parts[name])}


EXPERT = "model.layers.1.mlp.experts.3.down_proj"
HEADS = "model.layers.0.self_attn.q_proj"
FAULTS = {
    "no scales": (
        "gptq",
        EXPERT,
        without("scales"),
        r"3.down_proj: .* has g_idx, .* no scales",
    ),
    "no zeros": ("awq", HEADS, without("qzeros"), r"q_proj: .* has qweight, scales .* no qzeros"),
    "no codes": ("gptq", EXPERT, without("qweight"), r"has g_idx, qzeros, scales .* no qweight"),
    "no shape": ("compressed", EXPERT, without("weight_shape"), r"and no weight_shape"),
    "no order": ("shuffled", EXPERT, without("g_idx"), r"3.down_proj: .* and no g_idx"),
    "floats": (
        "gptq",
        EXPERT,
        changed("qweight", lambda t: t.float()),
        r"3.down_proj.qweight is float32, wanted is int32",
    ),
    "long scales": (
        "gptq",
        EXPERT,
        changed("scales", lambda t: t.double()),
        r"down_proj.scales is float64, wanted is one of float16, bfloat16, float32",
    ),
    "a group more": (
        "gptq",
        EXPERT,
        changed("scales", lambda t: t.repeat(2, 1)),
        r"down_proj.scales has 4 scales an output, wanted is 2 of 48",
    ),
    "fewer zeros": (
        "gptq",
        EXPERT,
        changed("qzeros", lambda t: t[:, 1:]),
        r"down_proj.qzeros has shape \[2, 7\], wanted is \[2, 8\]",
    ),
    "fewer codes": (
        "compressed",
        EXPERT,
        changed("weight_packed", lambda t: t[:, 1:]),
        r"weight_packed has shape \[64, 5\], wanted is 64 x 48 codes of 4 bits",
    ),
    "no matrix": (
        "awq",
        EXPERT,
        changed("qweight", lambda t: t.flatten()),
        r"down_proj.qweight has shape \[384\], wanted is a matrix",
    ),
    "another order": (
        "gptq",
        EXPERT,
        changed("g_idx", lambda t: t + 1),
        r"down_proj.g_idx has 1 to 2, wanted is 0 to 1",
    ),
    "another shape": (
        "compressed",
        HEADS,
        changed("weight_shape", lambda t: t[:1]),
        r"q_proj.weight_shape is \[64\], wanted is outputs and inputs",
    ),
    "an infinite scale": (
        "gptq",
        EXPERT,
        changed("scales", lambda t: t * torch.inf),
        r"down_proj.scales has values that are infinite or no numbers, wanted is numbers",
    ),
    "an infinite scale of a head": (
        "compressed",
        HEADS,
        changed("weight_scale", lambda t: t * torch.inf),
        r"q_proj.weight_scale has values that are infinite or no numbers",
    ),
    "a bias": (
        "gptq",
        EXPERT,
        lambda parts: {**parts, "bias": torch.ones(64)},
        r"3.down_proj.bias has values, and the model has no such parameter",
    ),
    "plain as well": (
        "gptq",
        HEADS,
        lambda parts: {**parts, "weight": torch.ones(64, 64)},
        r"q_proj.weight is in the checkpoint plain and packed",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_weight_is_named(fault: str, tmp_path: Path) -> None:
    name, module, change, message = FAULTS[fault]
    folder, _ = packed.build(tmp_path, SHUFFLED if name == "shuffled" else FORMATS[name])
    edited(folder, module, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_experts_of_another_width_are_refused(tmp_path: Path) -> None:
    folder, _ = packed.build(tmp_path, FORMATS["gptq"])
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "moe_intermediate_size": 32}))
    message = r"gate_proj.weight, .*up_proj.weight: packed are \[48, 64\] and \[48, 64\], the model"
    with pytest.raises(CheckpointError, match=rf"{message} wants \[64, 64\] of gate_up_proj"):
        load(folder)


@torch.no_grad()
def test_a_bias_of_zeros_beside_a_weight_does_nothing(tmp_path: Path) -> None:
    folder, plain = packed.build(tmp_path, FORMATS["gptq"])
    for module in (EXPERT, HEADS):
        edited(folder, module, lambda parts: {**parts, "bias": torch.zeros(64)})
    ids = zoo.sample_ids(batch=1, length=12)
    resident = AutoModelForCausalLM.from_pretrained(
        plain, dtype="auto", experts_implementation="eager"
    )
    assert torch.equal(load(folder)(ids).logits, resident(ids).logits)


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "3 bits": ("gptq", {"bits": 3}, r"bits is 3, not of 4, 8"),
    "text": ("gptq", {"bits": "4"}, r"bits is '4', not of 4, 8"),
    "8 bits of awq": ("awq", {"bits": 8}, r"bits is 8, not of 4"),
    "group": ("gptq", {"group_size": 0}, r"group_size is 0, not a count, or -1"),
    "no group": ("awq", {"group_size": None}, r"group_size is None, not a count, or -1"),
    "version": ("awq", {"version": "gemv"}, r"version is 'gemv', not of 'gemm', 'GEMM'"),
    "another name": ("awq", {"checkpoint_format": "gemv"}, r"checkpoint_format is 'gemv', not of"),
    "backend": ("awq", {"backend": "llm-awq"}, r"backend is 'llm-awq', not 'autoawq'"),
    "marlin": ("gptq", {"checkpoint_format": "marlin"}, r"checkpoint_format is 'marlin', not of"),
    "flag": ("gptq", {"is_marlin_format": True}, r"is_marlin_format is given, .*: take another"),
    "dynamic": ("gptq", {"dynamic": {"+:.*": {"bits": 8}}}, r"dynamic is .*, not only of modules"),
    "format": ("compressed", {"format": "float-quantized"}, r"format is 'float-quantized', not of"),
    "groups": ("compressed", {"config_groups": {}}, r"config_groups is \{\}, not one group"),
    "no groups": ("compressed", {"config_groups": None}, r"config_groups is None, not an object"),
    "sparse": ("compressed", {"sparsity_config": {"format": "24"}}, r"sparsity_config: format is"),
    "no sparsity": ("compressed", {"sparsity_config": 24}, r"sparsity_config is 24, not an object"),
    "a number": ("gptq", {"dynamic": 5}, r"dynamic is 5, not an object"),
    "transforms": (
        "compressed",
        {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
        "transform_config is given, and no transform is applied here",
    ),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_configuration_that_is_not_read_here_is_refused(fault: str, tmp_path: Path) -> None:
    """By its field, with what it says; the files are not looked at."""
    name, change, message = CONFIGS[fault]
    zoo.save_checkpoint("qwen3_moe", tmp_path)
    packed.configure(tmp_path, {**FORMATS[name].config, **change})
    with pytest.raises(CheckpointError, match=f"quantization_config: {message}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_activations": {"num_bits": 8}}, "group_0: input_activations is given, and inputs"),
        ({"output_activations": {"num_bits": 8}}, "group_0: output_activations is given, and"),
        ({"weights": None}, "group_0: weights is None, not an object"),
        ({"weights": {"num_bits": 4, "type": "float"}}, "weights: type is 'float', not of 'int'"),
        (
            {"weights": {"num_bits": 4, "group_size": 16, "actorder": "columns"}},
            "weights: actorder is 'columns', not of None, 'group'",
        ),
        ({"weights": {"num_bits": 2}}, "weights: num_bits is 2, not of 4, 8"),
        (
            {"weights": {"num_bits": 4, "strategy": "tensor_group"}},
            "weights: strategy is 'tensor_group', not of 'group', 'channel'",
        ),
    ],
)
def test_a_group_of_compressed_tensors_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    zoo.save_checkpoint("qwen3_moe", tmp_path)
    config = FORMATS["compressed"].config
    config["config_groups"]["group_0"] |= change
    packed.configure(tmp_path, config)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_plain_files_with_a_packed_configuration_are_refused(tmp_path: Path) -> None:
    zoo.save_checkpoint("qwen3_moe", tmp_path)
    packed.configure(tmp_path, FORMATS["gptq"].config)
    with pytest.raises(CheckpointError, match=r"says gptq, and no tensor is named \.\.\.qweight"):
        load(tmp_path)
