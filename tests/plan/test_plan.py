"""Forecasts: sizes as the headers say, sums that add up, speeds that benchmarks bear out."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from header_checkpoint import CONFIG, EXPERT_NBYTES, save
from hotexperts.cli.main import main
from hotexperts.errors import CheckpointError, ConfigError, UnsupportedModelError
from hotexperts.plan.forecast import forecast, step
from hotexperts.plan.machine import by_name
from hotexperts.plan.model import read_facts
from hotexperts.plan.split import demand


def index(folder: Path, weight_map: Any) -> None:
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def offsets(folder: Path, found: Any) -> None:
    encoded = json.dumps({"w": {"data_offsets": found}}).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded)


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
    "list": (lambda p: (p / "config.json").write_text("[]"), CheckpointError, "holds no object"),
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
        r"has no \.safetensors",
    ),
    "short": (
        lambda p: (p / "model.safetensors").write_bytes(b"abc"),
        CheckpointError,
        "is damaged",
    ),
    "long header": (
        lambda p: (p / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60)),
        CheckpointError,
        "header would take",
    ),
    "backwards": (lambda p: offsets(p, [5, 1]), CheckpointError, r"tensor w lies at \[5, 1\]"),
    "no offsets": (lambda p: offsets(p, None), CheckpointError, "tensor w lies at None"),
    "bools": (lambda p: offsets(p, [False, True]), CheckpointError, "tensor w lies at"),
    "no experts": (lambda p: save(p, experts=0), UnsupportedModelError, "has no tensors called"),
    "fewer experts": (lambda p: save(p, experts=32), CheckpointError, "says 64 .* files have 32"),
    "a lost file": (
        lambda p: index(p, {"a": "lost.safetensors"}),
        CheckpointError,
        "download complete",
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
    assert small.prefill_tokens_per_s < large.prefill_tokens_per_s
    with pytest.raises(ConfigError, match=r"the experts take 1.5 GB.*--ram is 1.0 GB"):
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


def test_forecasts_bear_out_what_was_measured() -> None:
    """Every measured step lies within the range, or at most 15 % outside of it."""
    path = Path(__file__).parents[2] / "tools/check_plan.py"
    spec = importlib.util.spec_from_file_location("check_plan", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_plan"] = module
    spec.loader.exec_module(module)
    rows = list(module.compare())
    assert len(rows) > 8
    assert [row for row in rows if abs(row.outside) > 0.15] == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save(tmp_path))
    assert main(["plan", folder, "--gpu", "RTX 4060", "--vram", "2GiB", "--ram", "16GiB"]) == 0
    out = capsys.readouterr().out
    assert f"vllm serve {folder} --moe-expert-cache-gib 2 --max-model-len 8192" in out
    assert f"--kv-cache-memory-bytes {8192 * 256}" in out
    assert "tokens/s, batch 1" in out
    assert main(["plan", folder, "--vram", "2GiB", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["machine"]["link_gb_s"] == 12
    assert 8 <= data["capacity"] < 64
    for arguments, message in (
        ([folder], "give --gpu NAME, or --vram SIZE"),
        ([folder, "--vram", "much"], "--vram: size 'much' is not a number with a unit"),
        ([folder, "--gpu", "RTX 4060", "--vram", "9GiB"], "more than the 8 GiB of RTX 4060"),
        ([str(tmp_path / "none"), "--gpu", "A100"], "no such folder"),
    ):
        assert main(["plan", *arguments]) == 2
        assert message in capsys.readouterr().err
