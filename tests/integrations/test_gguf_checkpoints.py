"""GGUF files of MoE models: the bits of the plain checkpoint, Q8_0 and Q4_0 as codes in memory."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

import hotexperts.transformers as hot
from hotexperts.bench.sources import resident_model
from hotexperts.cache.mapped_file import MappedFile
from hotexperts.cli.main import main
from hotexperts.cli.text import load_tokenizer
from hotexperts.errors import CheckpointError, ConfigError, UnsupportedModelError
from hotexperts.integrations.transformers import tiers
from hotexperts.integrations.transformers.gguf_checkpoint import Found
from hotexperts.integrations.transformers.gguf_weights import GgufCodes, GgufTensor
from hotexperts.integrations.transformers.plain_view import is_read_here
from hotexperts.integrations.transformers.repository import read_config

gguf = pytest.importorskip("gguf")
from integrations import gguf_checkpoints as files  # noqa: E402
from integrations.plain_twin import (  # noqa: E402
    DEVICE,
    check_same,
    load,
    logits,
    resident,
)

pytestmark = [pytest.mark.transformers, pytest.mark.interpret]
MIXED = {"gate": "Q8_0", "up": "Q5_0", "down": "Q4_0"}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize(("kind", "dtype", "bits"), [("Q8_0", "int8", 8.5), ("Q4_0", "int4", 4.5)])
def test_codes_stay_in_memory_and_make_the_plain_bits(
    kind: str, dtype: str, bits: float, family: str, tmp_path: Path
) -> None:
    path, plain = files.build(tmp_path, kind, family=family)
    model = load(path)
    check_same(model, resident(plain))
    cache = model.expert_cache
    assert (cache.expert_dtype, cache.dequantised, cache.relative_errors) == (dtype, "", {})
    assert "as the checkpoint has them" in cache.packing_report
    # A tile's scales are filled up to sixteen bytes.
    assert bits / 16 <= cache.host_nbytes / cache.expert_nbytes < bits / 16 + 0.02


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("F32", torch.float32)]
)
def test_plain_files_have_their_own_dtype(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path, plain = files.build(tmp_path, kind, others=kind, dtype=dtype)
    model = load(path)
    assert model.dtype == dtype
    check_same(model, resident(plain))
    assert model.expert_cache.host_nbytes == model.expert_cache.expert_nbytes
    assert model.expert_cache.dequantised == ""


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_K"])
def test_other_types_are_dequantised_one_expert_at_a_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a whole stack of experts, which is what may not fit the memory."""
    path, plain = files.build(tmp_path, kind, width=512)
    sizes: list[int] = []
    dequantize = gguf.dequantize

    def watched(data: np.ndarray, number: Any) -> np.ndarray:
        found = dequantize(data, number)
        if number.name == kind:
            sizes.append(found.size)
        return found

    monkeypatch.setattr(gguf, "dequantize", watched)
    model = load(path)
    assert max(sizes) == 512 * 256  # of an expert
    assert len(sizes) >= files.LAYERS * files.EXPERTS * 3
    check_same(model, resident(plain))
    cache = model.expert_cache
    assert (cache.expert_dtype, cache.dequantised) == ("none", f"GGUF {kind}")
    assert cache.host_nbytes == cache.expert_nbytes


def test_types_may_be_mixed(tmp_path: Path) -> None:
    """Gate and up are one matrix here: of two types it is plain, and down stays in codes."""
    path, plain = files.build(tmp_path, MIXED)
    model = load(path)
    check_same(model, resident(plain))
    assert model.expert_cache.expert_dtype == "int4"
    assert model.expert_cache.dequantised == "GGUF Q5_0, GGUF Q8_0"
    assert "gate_up_proj plain in 2 of 2 layers" in model.expert_cache.packing_report


def test_other_dtypes_round_the_same_numbers(tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.float32):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        path, plain = files.build(folder, "Q4_0", dtype=dtype)
        check_same(load(path, dtype=dtype), resident(plain))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_kernels_read_the_codes(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path, plain = files.build(tmp_path, kind)
    expected = logits(resident(plain))
    model = load(path, "device")
    assert model.expert_cache.mode == "device"
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("store", ["file", "disk"])
def test_elsewhere_experts_are_dequantised(store: str, tmp_path: Path) -> None:
    path, plain = files.build(tmp_path, "Q8_0")
    where = {"expert_pack": tmp_path / "experts.pack"} if store == "disk" else {}
    if store == "disk":
        hot.pack(path, **where)
    model = load(path, expert_store=store, **where)
    check_same(model, resident(plain))
    assert (model.expert_cache.store, model.expert_cache.dequantised) == (store, "GGUF Q8_0")


def test_where_memory_is_too_small_experts_are_said_to_be_dequantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = files.build(tmp_path, "Q8_0")
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: 0)
    model = load(path, expert_store="auto")
    check_same(model, resident(plain))
    assert (model.expert_cache.store, model.expert_cache.dequantised) == ("file", "GGUF Q8_0")


def test_packs_of_two_files_in_a_folder_have_two_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, _ = files.build(tmp_path)
    other = Path(shutil.copy(path, path.with_name("other.gguf")))
    assert hot.pack(path).path != hot.pack(other).path


def test_a_split_file_is_one_model_and_so_is_its_folder(tmp_path: Path) -> None:
    path, plain = files.build(tmp_path, "Q4_0", split=7)
    parts = sorted(path.parent.glob("m-*.gguf"))
    assert len(parts) > 2
    for where in (parts[1], path.parent):
        check_same(load(where), resident(plain))


def test_the_head_may_be_the_embedding(tmp_path: Path) -> None:
    path, plain = files.build(tmp_path, ties=True)
    model = load(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    check_same(model, resident(plain))


def test_the_resident_model_is_the_plain_one(tmp_path: Path) -> None:
    """As `verify` and `bench` load it."""
    path, plain = files.build(tmp_path, MIXED)
    found = resident_model(
        str(path),
        device=DEVICE,
        dtype="auto",
        trust_remote_code=False,
        experts_implementation="eager",
    )
    check_same(found, resident(plain))


def test_the_configuration_is_the_files(tmp_path: Path) -> None:
    """Whatever a key or a tensor says; options by the names of the configuration change it."""
    path, plain = files.build(tmp_path, without=("rope.freq_base", "attention.key_length"))
    model = load(path, max_position_embeddings=128)
    config, wanted = model.config, resident(plain).config
    for name in ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "vocab_size"):
        assert getattr(config, name) == getattr(wanted, name), name
    assert config.norm_topk_prob
    assert config.max_position_embeddings == 128
    assert config.rope_parameters["rope_theta"] == 10000.0  # llama.cpp's, where it says nothing


@pytest.mark.parametrize(
    ("kind", "codes", "numbers"),
    [
        ("Q4_0", [0xF1] * 16, [1 - 8] * 16 + [15 - 8] * 16),
        ("Q8_0", [*range(240, 256), *range(16)], [*range(-16, 0), *range(16)]),
    ],
)
def test_a_block_worked_by_hand(
    kind: str, codes: list[int], numbers: list[int], tmp_path: Path
) -> None:
    """A scale of 0.5, then codes: sixteen low halves are the first numbers, and 8 stands for 0."""
    block = bytes([0x00, 0x38, *codes])
    (tmp_path / "block").write_bytes(block)
    number = gguf.GGMLQuantizationType[kind]
    tensor = GgufTensor(MappedFile(tmp_path / "block"), "w", number, (1, 32), 0, len(block))
    found = GgufCodes("w", tensor)
    assert found.scales().tolist() == [[0.5]]
    mask = (1 << found.kind.bits) - 1
    assert (found.codes()[0] & mask).tolist() == [x & mask for x in numbers]
    assert tensor.tensor()[0].tolist() == [0.5 * x for x in numbers]


def test_the_command_says_which_file_and_what_became_of_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, _ = files.build(tmp_path, MIXED)
    asked = ["--prompt", "ab c", "--expert-cache-size", "3", "--max-new-tokens", "4"]
    assert main(["run", str(path.parent), *asked, "--device", "cpu"]) == 0
    out, err = capfd.readouterr()
    assert f"note: the model is {path}" in err
    assert out.startswith("ab c")
    assert "dequantised as read from GGUF Q5_0, GGUF Q8_0" in " ".join(out.split())


def test_any_part_of_a_split_file_has_the_tokenizer_of_the_first(tmp_path: Path) -> None:
    path, _ = files.build(tmp_path, split=7)
    parts = sorted(path.parent.glob("m-*.gguf"))
    words = load_tokenizer(str(parts[0]), trust_remote_code=False).get_vocab()
    assert load_tokenizer(str(parts[1]), trust_remote_code=False).get_vocab() == words


def test_a_mark_of_ours_in_a_config_json_is_not_obeyed(tmp_path: Path) -> None:
    path, plain = files.build(tmp_path)
    file = plain / "config.json"
    marked = {"hotexperts_gguf": str(path), "hotexperts_quantisation": {"quant_method": "gptq"}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **marked}))
    config, _ = read_config(plain, {})
    assert not is_read_here(config)


def test_a_tokenizer_that_transformers_cannot_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = files.build(tmp_path, has_tokenizer=False)
    assert main(["run", str(path), "--prompt", "a"]) == 2
    assert f"{path}: Transformers cannot read its tokenizer (" in capsys.readouterr().err


def corrupt_scale(path: Path) -> None:
    tensor = Found.of(path).tensors["blk.1.ffn_down_exps.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.begin)
        file.write(b"\xff\x7f")  # no number


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)


@pytest.mark.parametrize(
    ("build", "spoil", "error", "message"),
    [
        (
            {"rope.scaling.type": "yarn"},
            None,
            UnsupportedModelError,
            r"its positions are scaled \('yarn'\).*take the model's safetensors",
        ),
        ({"without": ("expert_count",)}, None, CheckpointError, r"lacks qwen3moe\.expert_count"),
        (
            {"without": ("token_embd.weight",)},
            None,
            CheckpointError,
            r"has no tensor token_embd\.weight: it is incomplete",
        ),
        (
            {"without": ("blk.1.attn_k.weight",)},
            None,
            CheckpointError,
            r"1 missing tensors, first model\.layers\.1\.self_attn\.k_proj\.weight",
        ),
        (
            {"without": ("blk.1.ffn_up_exps.weight",)},
            None,
            CheckpointError,
            r"layers\.1\.mlp\.experts\.gate_up_proj needs tensors named.*up_proj",
        ),
        (
            {"blk.0.exp_probs_b.bias": np.zeros(6, np.float32)},
            None,
            CheckpointError,
            r"1 tensors that Qwen3MoeForCausalLM has no place for, blk\.0\.exp_probs_b\.bias",
        ),
        (
            {"blk.0.steps.weight": np.zeros(6, np.int32)},
            None,
            CheckpointError,
            r"blk\.0\.steps\.weight is of the type I32, which.*take a file of another type",
        ),
        (
            {"expert_count": 5},
            None,
            CheckpointError,
            r"ffn_gate_inp\.weight has shape \[6, 64\], the model wants \[5, 64\]",
        ),
        (
            {"without": ("output.weight",), "output.weight": np.zeros((3, 64), np.float32)},
            None,
            CheckpointError,
            r"output\.weight has shape \[3, 64\], the model wants \[259, 64\]",
        ),
        ({}, corrupt_scale, CheckpointError, r"blk\.1\.ffn_down_exps\.weight has scales that are"),
        ({}, truncate, CheckpointError, r"m\.gguf: damaged or not GGUF.*download it again"),
    ],
)
def test_what_is_not_as_it_should_be_is_refused(
    build: dict[str, Any],
    spoil: Callable[[Path], None] | None,
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    path, _ = files.build(tmp_path, **build)
    if spoil is not None:
        spoil(path)
    with pytest.raises(error, match=message):
        load(path)


def test_other_architectures_and_options_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_tensor("token_embd.weight", np.zeros((3, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"'deepseek2'.*only qwen2moe, qwen3moe are"):
        load(path)
    path, _ = files.build(tmp_path)
    with pytest.raises(ConfigError, match=r"revision: .*is a file on this machine"):
        load(path, revision="main")
    with pytest.raises(ConfigError, match="auto_class is AutoModel: a GGUF file is for"):
        load(path, auto_class=AutoModel)


def test_what_names_no_one_file_is_refused(tmp_path: Path) -> None:
    path, _ = files.build(tmp_path)
    with pytest.raises(CheckpointError, match=r"none\.gguf: no such file"):
        load(path.with_name("none.gguf"))
    shutil.copy(path, path.with_name("other.gguf"))
    with pytest.raises(CheckpointError, match=r"2 models in GGUF \(m\.gguf, other\.gguf\): give"):
        load(path.parent)


def test_without_the_package_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = files.build(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match=r"it reads GGUF: pip install -e '\.\[gguf\]'"):
        load(path)
    assert main(["run", str(path), "--prompt", "a"]) == 2
    assert "gguf is not installed: pip install -e '.[gguf]'" in capsys.readouterr().err
