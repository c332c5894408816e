"""Checkpoints of GPTQ, AWQ and compressed-tensors: the plain one's bits, from codes in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hotexperts.transformers as hot
from hotexperts.bench.sources import resident_model
from hotexperts.cache.quantised import QuantisedStore
from hotexperts.errors import CheckpointError
from integrations import packed_checkpoints as packed
from integrations import zoo
from integrations.packed_checkpoints import FORMATS, SHUFFLED

pytestmark = [pytest.mark.transformers, pytest.mark.interpret]
DEVICE = "cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu"


def load(path: Path, mode: str = "host", **options: Any) -> Any:
    options = {"experts_algorithm": "eager", "expert_cache_size": 3, **options}
    return hot.load(path, cache_mode=mode, device=DEVICE, policy="lru", **options)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(zoo.sample_ids(batch=1, length=12).to(model.device)).logits.cpu()


def tokens(model: Any) -> list[int]:
    ids = zoo.sample_ids(batch=1, length=7).to(model.device)
    return model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()


def resident(path: Path, dtype: str = "auto") -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager")
    return model.to(DEVICE)


def check_same(found: Any, plain: Any) -> None:
    assert torch.equal(logits(found), logits(plain))
    assert tokens(found) == tokens(plain)
    parameters = dict(plain.named_parameters())
    for name, value in found.named_parameters():
        assert torch.equal(value, parameters[name]), name


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_checkpoint_is_the_plain_one(name: str, tmp_path: Path) -> None:
    """Codes in memory, every weight's bits those of float64 arithmetic."""
    form = FORMATS[name]
    folder, plain = packed.build(tmp_path, form)
    model = load(folder)
    check_same(model, resident(plain))
    cache = model.expert_cache
    assert (cache.expert_dtype, cache.relative_errors) == (f"int{form.bits}", {})
    assert f"int{form.bits}: " in cache.packing_report
    assert "as the checkpoint has them" in cache.packing_report
    size = form.bits / 16 + (4 if form.scales == torch.float32 or not form.is_symmetric else 2) / 32
    assert cache.host_nbytes < (size + 0.05) * cache.expert_nbytes


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "jamba", "deepseek_v4"])
def test_so_it_is_of_other_families(family: str, tmp_path: Path) -> None:
    """With other names of experts, shared ones, and layers of one input or two outputs."""
    reason = zoo.known_exception(family)
    if reason is not None:
        pytest.skip(reason)
    folder, plain = packed.build(tmp_path, FORMATS["gptq"], family)
    model = load(folder)
    assert model.expert_cache.expert_dtype == "int4"
    check_same(model, resident(plain))


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_kernels_read_packed_codes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    folder, plain = packed.build(tmp_path, FORMATS[name], "olmoe")
    expected = logits(resident(plain))
    for mode in ("host", "device"):
        model = load(folder, mode)
        assert model.expert_cache.mode == mode
        assert torch.equal(logits(model), expected)


def test_inputs_in_an_order_of_their_own_are_dequantised_while_they_are_read(
    tmp_path: Path,
) -> None:
    folder, plain = packed.build(tmp_path, SHUFFLED)
    model = load(folder)
    check_same(model, resident(plain))
    assert model.expert_cache.expert_dtype == "none"
    assert model.expert_cache.host_nbytes == model.expert_cache.expert_nbytes


@pytest.mark.parametrize("name", ["gptq-zeros", "compressed"])
@pytest.mark.parametrize("store", ["file", "disk"])
def test_elsewhere_they_are_dequantised_too(name: str, store: str, tmp_path: Path) -> None:
    folder, plain = packed.build(tmp_path, FORMATS[name])
    where = {"expert_pack": tmp_path / "experts.pack"} if store == "disk" else {}
    if store == "disk":
        hot.pack(folder, **where)
    model = load(folder, expert_store=store, **where)
    assert model.expert_cache.store == store
    check_same(model, resident(plain))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_round_the_same_numbers(dtype: str, tmp_path: Path) -> None:
    """The numbers are exact before they are rounded: float32 has them as float64 rounds them."""
    form = FORMATS["awq"]
    folder, _ = packed.build(tmp_path, form)
    model = load(folder, dtype=dtype)
    assert model.expert_cache.expert_dtype == ("int4" if dtype == "float16" else "none")
    source = zoo.build_model("qwen3_moe", dtype=torch.bfloat16)
    name = "model.layers.1.self_attn.q_proj.weight"
    exact = packed.quantise(source.get_parameter(name), form, len(name)).exact
    found = model.get_parameter(name)
    assert torch.equal(found, exact.float().to(found.dtype))
    store = model.expert_cache.providers[1].store
    _, row = store.layout.allocate(1, "cpu")
    store.copy_into(5, [tensor[0] for tensor in row])
    weight = source.get_parameter("model.layers.1.mlp.experts.down_proj")[5]
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    exact = packed.quantise(weight, form, len(name)).exact
    assert torch.equal(row.down_proj[0], exact.float().to(found.dtype))


def test_a_last_group_may_be_smaller(tmp_path: Path) -> None:
    """Experts have 48 inputs: one group of 32 and one of 16; the row's groups are then of 16."""
    form = FORMATS["gptq"]
    folder, _ = packed.build(tmp_path, form)
    store = load(folder).expert_cache.providers[0].store
    gate_up, down = store.form.packings
    assert (gate_up.group_columns, down.group_columns) == (32, 16)


def test_they_may_be_quantised_again(tmp_path: Path) -> None:
    """The error is that against their own values."""
    folder, _ = packed.build(tmp_path, FORMATS["gptq-int8"])
    cache = load(folder, expert_dtype="int4").expert_cache
    assert cache.expert_dtype == "int4"
    assert all(0.05 < error < 0.12 for error in cache.relative_errors.values())


def test_layers_that_are_not_packed_stay_plain(tmp_path: Path) -> None:
    form = FORMATS["compressed-zeros"]
    folder, plain = packed.build(tmp_path, form)
    whole = {k: v for f in plain.glob("*.safetensors") for k, v in load_file(f).items()}

    def put_back(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        module, _, last = name.rpartition(".")
        if not module.startswith(("model.layers.0.mlp.experts", "model.layers.1.self_attn.k_proj")):
            return {name: tensor}
        weight = f"{module}.weight"
        return {weight: whole[weight]} if last == "weight_packed" else {}

    zoo.rewrite_shards(folder, put_back)
    model = load(folder)
    check_same(model, resident(plain))
    first, second = (provider.store for provider in model.expert_cache.providers)
    assert not isinstance(first, QuantisedStore)
    assert isinstance(second, QuantisedStore)


def test_the_resident_model_of_a_packed_checkpoint_is_the_plain_one(tmp_path: Path) -> None:
    """As `verify` and `bench` load it."""
    folder, plain = packed.build(tmp_path, FORMATS["gptq-zeros"])
    found = resident_model(
        str(folder),
        device=DEVICE,
        dtype="auto",
        trust_remote_code=False,
        experts_implementation="eager",
    )
    check_same(found, resident(plain))


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
    folder, _ = packed.build(tmp_path, FORMATS[name])
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


def test_a_bias_of_zeros_beside_a_weight_does_nothing(tmp_path: Path) -> None:
    folder, plain = packed.build(tmp_path, FORMATS["gptq"])
    for module in (EXPERT, HEADS):
        edited(folder, module, lambda parts: {**parts, "bias": torch.zeros(64)})
    check_same(load(folder), resident(plain))


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
        ({"weights": None}, "group_0: weights is None, not an object"),
        ({"weights": {"num_bits": 4, "type": "float"}}, "weights: type is 'float', not of 'int'"),
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
