"""Forecasts: sizes as the headers say, sums that add up, speeds that benchmarks bear out."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from header_checkpoint import CONFIG, EXPERT_NBYTES, save
from hotexperts.cli.main import main
from hotexperts.errors import CheckpointError, ConfigError, UnsupportedModelError
from hotexperts.plan.forecast import forecast
from hotexperts.plan.machine import by_name
from hotexperts.plan.source import read_facts
from hotexperts.plan.speed import prefill_ms, step
from hotexperts.plan.split import demand


def index(folder: Path, weight_map: Any) -> None:
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def offsets(folder: Path, found: Any) -> None:
    encoded = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": found}}).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(5))


def test_a_second_form_of_the_same_weights_is_left_alone(tmp_path: Path) -> None:
    facts = read_facts(save(tmp_path))
    (tmp_path / "consolidated.safetensors").write_bytes(
        (tmp_path / "model.safetensors").read_bytes()
    )
    assert read_facts(tmp_path) == facts


def test_a_longer_context_is_slower(tmp_path: Path) -> None:
    facts, machine = read_facts(save(tmp_path)), by_name("H200")
    short, long = (step(facts, machine, 16, 8, kv) for kv in (0, 10**11))
    assert long.ms[1] - short.ms[1] == pytest.approx(1e5 / 4800)
    assert long.bound_ms > short.bound_ms


def test_facts_are_what_the_headers_say(tmp_path: Path) -> None:
    facts = read_facts(save(tmp_path))
    assert [(s.num_experts, s.top_k, s.row_nbytes) for s in facts.layers] == [
        (64, 8, -(-EXPERT_NBYTES // 256) * 256)
    ] * 2
    assert facts.expert_nbytes == 2 * 64 * EXPERT_NBYTES
    assert facts.other_nbytes == 5_000_000 + 1_000 + 2 * 2_000
    assert facts.kv_nbytes_per_token == 2 * 2 * 2 * 16 * 2
    nested = {"text_config": CONFIG, "quantization_config": {}, "kv_lora_rank": 512}
    latent = read_facts(save(tmp_path, {**nested, "qk_rope_head_dim": 64}))
    assert latent.kv_nbytes_per_token == 2 * (512 + 64) * 2
    assert latent.is_quantised


def config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


DAMAGES: dict[str, tuple[Any, type[Exception], str]] = {
    "no config": (
        lambda p: (p / "config.json").unlink(),
        CheckpointError,
        "cannot read .*config.json",
    ),
    "no JSON": (lambda p: (p / "config.json").write_text("{"), CheckpointError, "is no JSON"),
    "deep": (lambda p: (p / "config.json").write_text("[" * 10**5), CheckpointError, "no JSON"),
    "list": (
        lambda p: (p / "config.json").write_text("[]"),
        CheckpointError,
        "holds no JSON object",
    ),
    "negative": (lambda p: config(p, head_dim=-16), CheckpointError, "head_dim is -16: a count"),
    "text": (lambda p: config(p, num_experts="64"), CheckpointError, "num_experts is '64'"),
    "bool": (lambda p: config(p, num_hidden_layers=True), CheckpointError, "is True: a count"),
    "dense": (
        lambda p: (p / "config.json").write_text('{"num_hidden_layers": 2}'),
        UnsupportedModelError,
        "no Mixture-of-Experts model",
    ),
    "no weights": (
        lambda p: (p / "model.safetensors").unlink(),
        CheckpointError,
        r"has no \.safetensors: give the folder of a whole checkpoint, or its hub id",
    ),
    "short": (
        lambda p: (p / "model.safetensors").write_bytes(b"abc"),
        CheckpointError,
        "truncated or not safetensors",
    ),
    "long header": (
        lambda p: (p / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60)),
        CheckpointError,
        "the header alone claims",
    ),
    "backwards": (lambda p: offsets(p, [5, 1]), CheckpointError, "tensor 'w' of shape"),
    "no offsets": (lambda p: offsets(p, None), CheckpointError, "cannot be understood"),
    "bools": (lambda p: offsets(p, [False, True]), CheckpointError, "cannot be understood"),
    "no experts": (lambda p: save(p, experts=0), UnsupportedModelError, "has no tensors called"),
    "fewer experts": (lambda p: save(p, experts=32), CheckpointError, "says 64 .* files have 32"),
    "a lost file": (
        lambda p: index(p, {"a": "lost.safetensors"}),
        CheckpointError,
        "download the rest",
    ),
    "a cut file": (
        lambda p: os.truncate(p / "model.safetensors", 100_000),
        CheckpointError,
        "truncated: tensor",
    ),
    "an index of elsewhere": (
        lambda p: index(p, {"a": "../other/model.safetensors"}),
        CheckpointError,
        "index.json is damaged",
    ),
    "no vocabulary": (
        lambda p: config(p, vocab_size=None),
        CheckpointError,
        "config.json has no vocab_size",
    ),
    "no index": (lambda p: index(p, 3), CheckpointError, "index.json is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_such_checkpoint_is_refused(damage: str, tmp_path: Path) -> None:
    spoil, error, message = DAMAGES[damage]
    folder = save(tmp_path / "model")
    spoil(folder)
    with pytest.raises(error, match=message):
        read_facts(folder)


def test_the_parts_fit_the_budget_and_the_worst_is_no_better_than_the_best(tmp_path: Path) -> None:
    facts, machine = read_facts(save(tmp_path)), by_name("RTX 4090")
    options: dict[str, Any] = {"ram_nbytes": 8 << 30, "context": 4096, "batch": 1}
    small, large = (forecast(facts, machine, budget_nbytes=gib << 30, **options) for gib in (2, 3))
    assert sum(small.gpu_nbytes.values()) <= 2 << 30
    assert small.capacity < large.capacity == 64
    assert small.hit_rate[0] < small.hit_rate[1] < 1
    assert small.decode_tokens_per_s[0] < small.decode_tokens_per_s[1] <= small.bound_tokens_per_s
    assert small.decode_tokens_per_s[1] < large.decode_tokens_per_s[1]
    assert small.prefill_tokens_per_s[1] < large.prefill_tokens_per_s[1]
    assert small.prefill_tokens_per_s[0] <= small.prefill_tokens_per_s[1]
    assert small.loop_tokens_per_s[1] < small.decode_tokens_per_s[1]
    assert large.limit == "how fast the GPU's memory is"
    slow = machine._replace(link_gb_s=0.1)
    assert forecast(facts, slow, budget_nbytes=2 << 30, **options).limit == "the link"
    with pytest.raises(ConfigError, match=r"take 1.5 GB.*--ram is 1.0 GB.*--expert-store disk"):
        forecast(facts, machine, budget_nbytes=2 << 30, **options | {"ram_nbytes": 10**9})
    with pytest.raises(ConfigError, match="a GPU budget of"):
        forecast(facts, machine, budget_nbytes=1 << 30, **options)


def test_misses_come_from_a_replay() -> None:
    found = demand(64, 8, 16, 1)
    assert found.demanded == 8
    assert 0 < found.missed == found.mean_missed < demand(64, 8, 8, 1).missed
    assert demand(64, 8, 16, 8).demanded > 20


def test_gpus_go_by_the_names_that_people_use() -> None:
    assert by_name("nvidia geforce rtx 4090") == by_name("4090") == by_name("RTX-4090")
    with pytest.raises(ConfigError, match=r"--gpu 'Voodoo 2' is not known: give --vram.*RTX 3060"):
        by_name("Voodoo 2")


def check_plan() -> Any:
    path = Path(__file__).parents[2] / "tools/check_plan.py"
    spec = importlib.util.spec_from_file_location("check_plan", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_plan"] = module
    spec.loader.exec_module(module)
    return module


def test_forecasts_bear_out_what_was_measured() -> None:
    """Whatever was measured lies within the range, or at most 25 % outside of it.

    Where routing was drawn as the forecast's is, it is as near to the better end.
    """
    module = check_plan()
    rows = list(module.compare())
    assert len(rows) > 50
    names = {row.name for row in rows}
    assert {"vllm-promise: 8 GiB, slots", "vllm-promise: 24 GiB, prefill"} < names
    outside = {row.name for row in rows if abs(row.outside) > 0.25}
    assert outside == set(module.OUTLIERS)
    for page in ("plan.md", "decisions/0013-forecasts-are-ranges.md"):
        told = (module.RESULTS.parents[1] / "docs" / page).read_text()
        for row in rows:
            assert row.name not in outside or f"{row.outside:.0%}".replace("%", " %") in told
    assert [row for row in rows if row.is_drawn and abs(row.error) > 0.25] == []


def test_a_forecast_outside_of_its_range_is_told() -> None:
    compared = check_plan().Compared
    assert compared("a", (4.0, 2.0), 3.0).outside == 0
    assert compared("a", (4.0, 2.0), 5.0).outside == pytest.approx(0.25)
    assert compared("a", (4.0, 2.0), 1.0).outside == pytest.approx(-0.5)
    assert compared("a", (4.0, 2.0), 3.0, is_drawn=True).error == pytest.approx(0.5)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save(tmp_path))
    assert main(["plan", folder, "--gpu", "RTX 4060", "--vram", "2GiB", "--ram", "16GiB"]) == 0
    out = capsys.readouterr().out
    assert f"vllm serve {folder} --moe-expert-cache-gib 2 --max-model-len 8192" in out
    assert f"--kv-cache-memory-bytes {8192 * 256}" in out
    assert "tokens/s in vLLM, batch 1" in out
    assert "tokens/s in Transformers" in out
    assert main(["plan", folder, "--vram", "2GiB", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["machine"]["link_gb_s"] == 12
    assert 8 <= data["capacity"] < 64
    for arguments, message in (
        ([folder], "give --gpu NAME, or --vram SIZE"),
        ([folder, "--vram", "much"], "--vram: size 'much' is not a number with a unit"),
        ([folder, "--gpu", "RTX 4060", "--vram", "9GiB"], "more than the 8 GiB of RTX 4060"),
        ([folder, "--vram", "2GiB,much"], "--vram: size 'much' is not"),
        ([folder, "--vram", "256MiB,512MiB"], "a GPU budget of 512 MiB holds"),
        ([str(tmp_path / "none"), "--gpu", "A100"], "no such folder"),
    ):
        assert main(["plan", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_several_sizes_are_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(save(tmp_path)), "--vram", "1GiB,2GiB", "--vram", "3GiB"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "too small" in out
    assert "64 of 64" in out
    assert main([*arguments, "--json"]) == 0
    none, some, all_ = json.loads(capsys.readouterr().out)
    assert "a GPU budget of 1 GiB holds" in none["refusal"]
    assert none["budget_nbytes"] == 1 << 30
    assert some["capacity"] < all_["capacity"] == 64
    assert main(["plan", str(tmp_path), "--vram", "2GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["capacity"] == some["capacity"]


def test_a_small_budget_has_smaller_prefill_steps(tmp_path: Path) -> None:
    wide = CONFIG | {"hidden_size": 8192, "moe_intermediate_size": 8192}
    facts, machine = read_facts(save(tmp_path, wide)), by_name("RTX 4090")
    options: dict[str, Any] = {"ram_nbytes": None, "context": 16, "batch": 1}
    found = forecast(facts, machine, budget_nbytes=5 << 29, **options)
    assert found.prefill_tokens == 1024
    assert any(part == "workspace of 1024 tokens" for part in found.gpu_nbytes)
    large = forecast(facts, machine, budget_nbytes=8 << 30, **options)
    assert large.prefill_tokens == 2048


def test_a_prefill_streams_what_is_absent_and_multiplies(tmp_path: Path) -> None:
    facts, machine = read_facts(save(tmp_path)), by_name("H200")
    absent_nbytes = 2 * (64 - 16) * facts.layers[0].row_nbytes
    worst, best = prefill_ms(facts, machine, 16, 10**6)
    assert best == pytest.approx(absent_nbytes / (0.99 * 52e9) * 1e3)
    flops = 2 * (2 * 8 * 3 * 128 * 64 + facts.other_nbytes / 2)
    assert worst - best == pytest.approx(1e6 * flops / (0.2 * 989e12) * 1e3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "'' is no name of a model: give a folder, a .gguf file, or a hub id"),
        *(
            (name, f"{name}: no such folder: give one with config.json")
            for name in ("./nowhere", "-x", "org/.x", "a--b", "org/model.git", "x.", "~/m")
        ),
    ],
)
def test_what_can_be_no_model_is_refused_without_the_hub(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_facts(name)
