"""Checkpoints of GPTQ, AWQ and compressed-tensors: the plain one's bits, from codes in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hotexperts.transformers as hot
from hotexperts.bench.sources import resident_model
from hotexperts.cache.pack_format import PackHeader
from hotexperts.cache.pack_source import check_quantisation
from hotexperts.cache.quantised import QuantisedStore
from hotexperts.errors import CheckpointError
from integrations import packed_checkpoints as packed
from integrations import zoo
from integrations.packed_checkpoints import FORMATS, SHUFFLED, SHUFFLED_ZEROS
from integrations.plain_twin import (
    DEVICE,
    check_same,
    load,
    logits,
    resident,
)

pytestmark = [pytest.mark.transformers, pytest.mark.interpret]


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


@pytest.mark.parametrize("form", [SHUFFLED, SHUFFLED_ZEROS], ids=lambda form: form.method)
def test_inputs_in_an_order_of_their_own_are_dequantised_while_they_are_read(
    form: packed.Format, tmp_path: Path
) -> None:
    folder, plain = packed.build(tmp_path, form)
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


def test_a_pack_knows_how_the_checkpoint_s_bytes_were_read(tmp_path: Path) -> None:
    """Of other zero points the files' sizes, times and headers say nothing."""
    folder, plain = packed.build(tmp_path, FORMATS["gptq-zeros"])
    where = {"expert_pack": tmp_path / "experts.pack"}
    written = hot.pack(folder, **where)
    config = json.loads((folder / "config.json").read_text())
    quantisation = config["quantization_config"]
    again = {**config, "quantization_config": dict(reversed(quantisation.items())), "x": 1}
    (folder / "config.json").write_text(json.dumps(again))
    assert hot.pack(folder, **where).num_written == 0
    check_same(load(folder, expert_store="disk", **where), resident(plain))
    header = PackHeader.read(written.path)
    other = {**quantisation, "damp_percent": 0.5}
    packed.configure(folder, other)
    message = "since it was packed: config.json has another quantization_config: make it again wi"
    with pytest.raises(CheckpointError, match=message):
        load(folder, expert_store="disk", **where)
    with pytest.raises(CheckpointError, match="has no quantization_config: make it again"):
        check_quantisation(written.path, header.quantisation, None)
    before = replace(header, quantisation=None)  # as packs were written
    assert b"quantisation" not in before.encoded
    with pytest.raises(CheckpointError, match="as packs of an earlier version, or the checkpoint"):
        check_quantisation(written.path, before.quantisation, header.quantisation)
    assert hot.pack(folder, **where).num_written == written.num_rows
    assert load(folder, expert_store="disk", **where).expert_cache.store == "disk"


def test_a_pack_of_a_plain_checkpoint_is_as_it_was(tmp_path: Path) -> None:
    """Those that earlier versions wrote still open."""
    folder = zoo.save_checkpoint("olmoe", tmp_path / "model")
    header = PackHeader.read(hot.pack(folder, expert_pack=tmp_path / "a.pack").path)
    assert header.quantisation is None
    assert b"quantisation" not in header.encoded


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
