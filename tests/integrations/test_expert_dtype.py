"""Experts in host memory as codes: quantised while loading, or by their checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hotexperts.transformers as hot
from hotexperts.errors import CheckpointError, ConfigError
from hotexperts.integrations.transformers import tiers
from integrations import zoo

pytestmark = [pytest.mark.transformers, pytest.mark.interpret]
DEVICE = "cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu"
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def load(path: Path, mode: str = "host", **options: Any) -> Any:
    if mode == "device":
        pytest.importorskip("triton")
    options = {"experts_algorithm": "eager", "expert_cache_size": 3, **options}
    return hot.load(path, cache_mode=mode, device=DEVICE, policy="lru", **options)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(zoo.sample_ids(batch=1, length=12).to(model.device)).logits.cpu()


def resident(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", experts_implementation="eager")
    return model.to(DEVICE)


def stored(model: Any) -> dict[str, torch.Tensor]:
    """Every experts parameter `[E, *shape]` as the stores give it."""
    found = {}
    for name, provider in zip(model.expert_cache.names, model.expert_cache.providers, strict=True):
        _, tensors = provider.store.layout.allocate(provider.store.num_experts, "cpu")
        for expert in range(provider.store.num_experts):
            provider.store.copy_into(expert, [tensor[expert] for tensor in tensors])
        found |= {f"{name}.{key}": tensor for key, tensor in tensors._asdict().items()}
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"))


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
def test_quantised_experts_are_the_resident_model_s_own_quantised(
    dtype: str, checkpoint: Path
) -> None:
    """A resident model with the stores' values gives the cached one's bits; errors are true."""
    cached = load(checkpoint, expert_dtype=dtype)
    cache, values = cached.expert_cache, stored(cached)
    assert (cache.expert_dtype, cache.packing) == (dtype, "none")
    full = resident(checkpoint)
    parameters = {name: parameter.detach() for name, parameter in full.named_parameters()}
    bounds = {"fp8": (0.02, 0.03), "int8": (0.003, 0.01), "int4": (0.07, 0.12)}
    for layer in cache.names:
        pairs = [(parameters[k], v) for k, v in values.items() if k.startswith(f"{layer}.")]
        lost = sum(float((v.double() - p.cpu().double()).square().sum()) for p, v in pairs)
        whole = sum(float(p.double().square().sum()) for p, _ in pairs)
        assert cache.relative_errors[layer] == pytest.approx((lost / whole) ** 0.5, rel=1e-6)
        assert bounds[dtype][0] < cache.relative_errors[layer] < bounds[dtype][1]
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
    found = logits(cached)
    assert torch.equal(found, logits(full))
    assert not torch.equal(found, logits(resident(checkpoint)))
    store = cache.providers[0].store
    assert cache.host_nbytes < {"int4": 0.35, "int8": 0.6, "fp8": 0.6}[dtype] * cache.expert_nbytes
    assert cache.stats.bytes_moved == cache.stats.misses * store.form.nbytes
    assert f"{dtype}: " in cache.packing_report
    assert "lossy: relative error" in cache.packing_report


def test_kernels_give_the_same_tokens(checkpoint: Path) -> None:
    prompt = zoo.sample_ids(batch=1, length=70).to(DEVICE)
    found = []
    for mode in ("host", "device"):
        model = load(checkpoint, mode, expert_dtype="int4", experts_algorithm="batched_mm")
        assert model.expert_cache.mode == mode
        found.append(model.generate(prompt, max_new_tokens=1, do_sample=False))
    assert torch.equal(*found)


def test_attach_quantises_too(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    options = {"expert_cache_size": 3, "device": DEVICE, "cache_mode": "host"}
    hot.attach(model, expert_dtype="int8", **options)
    loaded = load(checkpoint, expert_dtype="int8")
    assert model.expert_cache.relative_errors == loaded.expert_cache.relative_errors
    for name, value in stored(loaded).items():
        assert torch.equal(value, stored(model)[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_dtype": "int3"}, "expert_dtype is 'int3': use 'none', 'fp8', 'int8' or 'int4'"),
        ({"expert_store": "file"}, "memory, which expert_store 'file' does not: use expert_store"),
        ({"expert_store": "disk"}, "memory, which expert_store 'disk' does not: use expert_store"),
        ({"expert_packing": "packed12"}, "two forms of the same experts: leave one of the two out"),
        ({"dtype": "float32"}, "for slots of 16 bits, and .* is float32: use dtype 'bfloat16'"),
    ],
)
def test_what_cannot_be_quantised_is_refused(
    options: dict[str, Any], message: str, checkpoint: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(checkpoint, "auto", **{"expert_dtype": "int8"} | options)


def test_weights_that_are_no_numbers_are_refused_before_a_layer_is_taken(
    checkpoint: Path,
) -> None:
    model = resident(checkpoint)
    expected = logits(model)
    *_, last = (m for name, m in model.named_modules() if name.endswith("mlp.experts"))
    with torch.no_grad():
        kept = last.down_proj[2, 0, 0].clone()
        last.down_proj[2, 0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="no numbers, which cannot be quantised"):
        hot.attach(model, expert_cache_size=3, device=DEVICE, expert_dtype="int8")
    with torch.no_grad():
        last.down_proj[2, 0, 0] = kept
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("which", ["weights", "scales"])
def test_experts_of_several_dtypes_are_left_to_transformers(which: str, tmp_path: Path) -> None:
    """Rows have one dtype of codes and one of scales: the first expert's says nothing of others."""
    path = zoo.build_fp8_checkpoint(tmp_path)

    def convert(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        is_first = ".experts.0." in name
        if which == "scales" and is_first and name.endswith("_scale_inv"):
            return {name: tensor.bfloat16()}
        if which == "weights" and not is_first and ".experts." in name:
            return {name: tensor.float().to(torch.float8_e5m2) if "scale" not in name else tensor}
        return {name: tensor}

    zoo.rewrite_shards(path, convert)
    model = load(path, dtype="bfloat16")
    layer = model.expert_cache.names[0]
    exact = from_file(path, f"{layer}.5.down_proj").float().bfloat16()
    row = model.expert_cache.providers[0].store.layout.allocate(1, torch.device("cpu"))[1]
    model.expert_cache.providers[0].store.copy_into(5, [tensor[0] for tensor in row])
    assert torch.equal(row.down_proj[0], exact)


def scales_as(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[str, torch.Tensor], dict[str, torch.Tensor]]:
    def convert(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: change(tensor) if name.endswith("_scale_inv") else tensor}

    return convert


SCALES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32 blocks": lambda scale: scale,
    "bfloat16 blocks": lambda scale: scale.bfloat16(),
    "exponents": lambda scale: (scale.log2().round() + 127).to(torch.uint8),
    "one a tensor": lambda scale: scale.amax().reshape(1, 1),
}


def from_file(path: Path, name: str) -> torch.Tensor:
    """An expert's matrix of an fp8 checkpoint, in float64: each code times its block's scale."""
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    weight, scale = tensors[f"{name}.weight"].double(), tensors[f"{name}.weight_scale_inv"]
    scale = 2.0 ** (scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
    for dim in range(2):
        scale = scale.repeat_interleave(weight.shape[dim] // scale.shape[dim], dim)
    return weight * scale


@pytest.mark.parametrize("scales", SCALES)
def test_fp8_checkpoints_keep_their_codes(scales: str, tmp_path: Path) -> None:
    path = zoo.build_fp8_checkpoint(tmp_path)
    zoo.rewrite_shards(path, scales_as(SCALES[scales]))
    model = load(path, dtype="bfloat16")
    cache = model.expert_cache
    assert (cache.expert_dtype, cache.relative_errors) == ("fp8", {})
    assert "fp8: " in cache.packing_report
    assert "as the checkpoint has them" in cache.packing_report
    assert cache.host_nbytes < 0.65 * cache.expert_nbytes
    expected = resident_in(torch.bfloat16, path)
    assert torch.equal(logits(model), logits(expected))
    values, parameters = stored(model), dict(expected.named_parameters())
    for name, value in values.items():
        assert torch.equal(value, parameters[name].cpu()), name
    layer = cache.names[0]
    for expert in (0, 5):
        where = f"{layer}.{expert}"
        for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            exact = torch.cat([from_file(path, f"{where}.{part}_proj") for part in parts])
            found = values[f"{layer}.{name}"][expert]
            assert torch.equal(found, exact.float().bfloat16())


def resident_in(dtype: torch.dtype, path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager")
    return model.to(DEVICE)


def test_mxfp4_checkpoints_keep_their_codes(tmp_path: Path) -> None:
    """Blocks are [expert, out, group, 16] bytes, the low half first; slots hold [in, out]."""
    path = zoo.build_mxfp4_checkpoint(tmp_path)
    model = load(path)
    cache = model.expert_cache
    assert (cache.expert_dtype, cache.relative_errors) == ("mxfp4", {})
    assert cache.host_nbytes < 0.35 * cache.expert_nbytes
    assert torch.equal(logits(model), logits(resident(path)))
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    values = stored(model)
    for layer in cache.names:
        for name in ("gate_up_proj", "down_proj"):
            blocks = tensors[f"{layer}.{name}_blocks"].long()
            codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
            numbers = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64)[codes]
            scale = 2.0 ** (tensors[f"{layer}.{name}_scales"].double() - 127)
            exact = (numbers * scale.unsqueeze(-1)).flatten(-2).mT
            assert torch.equal(values[f"{layer}.{name}"], exact.bfloat16())
            bias = f"{layer}.{name}_bias"
            assert torch.equal(values[bias], tensors[bias])


@pytest.mark.parametrize("build", [zoo.build_fp8_checkpoint, zoo.build_mxfp4_checkpoint])
def test_kernels_read_a_checkpoint_s_codes(build: Any, tmp_path: Path) -> None:
    path = build(tmp_path)
    found = [logits(load(path, mode)) for mode in ("host", "device")]
    assert torch.equal(*found)


def test_what_a_checkpoint_quantised_may_be_quantised_again(tmp_path: Path) -> None:
    """The error is that against its own values."""
    cache = load(zoo.build_fp8_checkpoint(tmp_path), expert_dtype="int4").expert_cache
    assert cache.expert_dtype == "int4"
    assert all(0.05 < error < 0.12 for error in cache.relative_errors.values())


def test_auto_reckons_with_what_experts_take_in_memory(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.8 of the free memory, in the form that they would have there."""
    fp8 = zoo.build_fp8_checkpoint(tmp_path)
    free = [0]
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: free[0])
    for path, options in ((fp8, {"dtype": "bfloat16"}), (checkpoint, {"expert_dtype": "int8"})):
        needed = load(path, **options).expert_cache.host_nbytes
        free[0] = int(needed / 0.8) + 1
        cache = load(path, expert_store="auto", **options).expert_cache
        assert (cache.store, cache.host_nbytes) == ("ram", needed)
        assert cache.expert_dtype != "none"
    free[0] //= 2
    seen: list[int] = []
    told = load(fp8, dtype="bfloat16", progress=lambda done, total: seen.append(done - total))
    assert (seen[-1], len(seen)) == (
        0,
        sum(p.store.num_experts for p in told.expert_cache.providers),
    )
    cache = load(fp8, expert_store="auto", dtype="bfloat16").expert_cache
    assert (cache.store, cache.expert_dtype) == ("file", "none")
    with pytest.raises(ConfigError, match="which expert_store 'file' does not"):
        load(checkpoint, expert_store="auto", expert_dtype="int8")


@pytest.mark.parametrize("options", [{"expert_store": "file"}, {"dtype": "float32"}])
def test_elsewhere_experts_are_dequantised_while_they_are_read(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = load(zoo.build_fp8_checkpoint(tmp_path), **options)
    assert model.expert_cache.expert_dtype == "none"
    dtype = torch.float32 if "dtype" in options else torch.bfloat16
    assert torch.equal(logits(model), logits(resident_in(dtype, tmp_path)))
