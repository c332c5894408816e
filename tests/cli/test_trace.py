"""`hotexperts trace`: what is recorded is what the model asks for, and nothing else changes."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.conftest import Cli, Result
from hotexperts.simulate import Trace, read_trace
from hotexperts.simulate.generate import TraceSize, generate

PROMPTS = ["The tide is", "def read_file(path):"]
NUM_NEW = 6
CPU = ("--device", "cpu", "--max-new-tokens", NUM_NEW)
SIZE = TraceSize(num_sequences=3, num_tokens=5, num_layers=2, num_experts=16, top_k=4)
NUMBERS = ("--sequences", 3, "--tokens", 5, "--layers", 2, "--experts", 16, "--top-k", 4)

uses_a_model = pytest.mark.transformers


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(PROMPTS) + "\r\n")
    return file


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the model answers from here on."""
    pytest.importorskip("transformers")
    from hotexperts.cli.generate import Session

    original = Session.answer
    found: list[dict[str, Any]] = []

    def answer(self: Session, *args: Any, **options: Any) -> dict[str, Any]:
        found.append(original(self, *args, **options))
        return found[-1]

    monkeypatch.setattr(Session, "answer", answer)
    return found


def assert_one_line(result: Result, message: str) -> None:
    assert (result.status, result.out) == (2, ""), result
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert message in result.err


def seen_by_hooks(prompt: str) -> np.ndarray[Any, Any]:
    """The demonstration model's ids `[token, layer, k]` for a prompt and its answer."""
    import torch

    from hotexperts.cli.text import load_tokenizer
    from hotexperts.demo import demo_model_path
    from hotexperts.transformers import load

    path = str(demo_model_path())
    model = load(path, expert_cache_size=2, device="cpu")
    inputs = load_tokenizer(path, trust_remote_code=False)(prompt, return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    layers: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    for layer, seen in zip(model.model.layers, layers, strict=True):
        layer.mlp.experts.register_forward_pre_hook(lambda _, args, s=seen: s.append(args[1]))
    model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False)
    return torch.stack([torch.cat(seen) for seen in layers], dim=1).numpy()


@uses_a_model
def test_ids_phases_and_sequences(
    prompts: Path, tmp_path: Path, cli: Cli, answers: list[dict[str, Any]]
) -> None:
    out = tmp_path / "t.npz"
    result = cli("trace", "--prompts", prompts, "--out", out, "--licence", "CC0", *CPU)
    trace = read_trace(out)
    told = f"{out}: {len(trace.ids)} tokens, 6 layers, 4 of 32 experts\n"
    assert result == (0, told, "")
    for seq, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        is_mine = trace.seq == seq
        assert np.array_equal(trace.ids[is_mine], seen_by_hooks(prompt))
        phases = [0] * answer["num_prompt_tokens"] + [1] * (NUM_NEW - 1)
        assert trace.phase[is_mine].tolist() == phases, "the last new token is never fed"
    assert trace.meta.pop("source").endswith("up to 6 likeliest tokens after it, in bfloat16")
    model = "the demonstration model"
    assert trace.meta == {
        **{"model": model, "n_experts": 32, "k": 4, "licence": "CC0"},
        "expert_nbytes": 3 * 128 * 64 * 2,
    }


@uses_a_model
def test_recording_changes_no_answer(
    prompts: Path, tmp_path: Path, cli: Cli, answers: list[dict[str, Any]]
) -> None:
    cli("trace", "--prompts", prompts, "--out", tmp_path / "t.npz", "--logits", *CPU)
    for prompt, recorded in zip(PROMPTS, list(answers), strict=True):
        plain = cli("run", "--prompt", prompt, "--json", *CPU).json
        assert (recorded["text"], recorded["token_ids"]) == (plain["text"], plain["token_ids"])


@uses_a_model
def test_logits_are_those_that_chose(prompts: Path, tmp_path: Path, cli: Cli) -> None:
    argv = ("trace", "--prompts", prompts, "--out", tmp_path / "t.npz", *CPU)
    assert cli(*argv, "--logits").status == 0
    found = np.load(tmp_path / "t.npz")
    chosen = np.take_along_axis(found["logits"], found["ids"].astype(int), axis=2)
    assert found["logits"].shape == (*found["ids"].shape[:2], 32)
    assert np.array_equal(chosen.min(axis=2), np.sort(found["logits"], axis=2)[..., -4])
    assert cli(*argv).status == 0
    assert "logits" not in np.load(tmp_path / "t.npz")


@uses_a_model
def test_guesses_are_counted_in_the_last_line(prompts: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "t.npz"
    argv = ("trace", "--prompts", prompts, "--out", out, *CPU)
    told = cli(*argv, "--guesses").out
    found = np.load(out)
    ids, guesses = found["ids"].astype(int), found["guesses"].astype(int)
    assert guesses.shape == (*ids.shape[:2], 8)
    assert (guesses[:, -1] == 255).all()
    pairs = list(zip(ids[:, 1:].reshape(-1, 4), guesses[:, :-1].reshape(-1, 8), strict=True))
    rates = [
        100 * sum(len({*asked} & {*likely[:num]}) for asked, likely in pairs) / (4 * len(pairs))
        for num in (4, 8)
    ]
    assert told.endswith(
        "4 of 32 experts; guesses of the next layer's experts found "
        f"{rates[0]:.1f} % with 4 and {rates[1]:.1f} % with 8\n"
    )
    assert 50 < rates[0] < rates[1] < 100, "chance finds 12.5 and 25"
    assert cli(*argv).out.endswith("4 of 32 experts\n")
    assert "guesses" not in np.load(out)


@uses_a_model
@pytest.mark.interpret
def test_a_cache_that_the_device_manages(
    saved_model: Path, kernel_device: str, prompts: Path, tmp_path: Path, cli: Cli
) -> None:
    argv = ("trace", saved_model, "--prompts", prompts, "--max-new-tokens", 2)
    argv = (*argv, "--device", kernel_device, "--expert-cache-size", 3)
    for mode in ("host", "device"):
        out = tmp_path / f"{mode}.npz"
        assert cli(*argv, "--cache-mode", mode, "--guesses", "--out", out).status == 0
    host, device = (read_trace(tmp_path / f"{mode}.npz") for mode in ("host", "device"))
    assert np.array_equal(host.ids, device.ids)
    assert len(host.ids) == sum(map(len, PROMPTS)) + 2
    guesses = [np.load(tmp_path / f"{mode}.npz")["guesses"] for mode in ("host", "device")]
    assert np.array_equal(*guesses)


@uses_a_model
def test_ctrl_c_keeps_what_was_recorded(
    prompts: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotexperts.integrations.transformers.recording import _Rows

    out = tmp_path / "t.npz"
    assert cli("trace", "--prompts", prompts, "--out", out, *CPU).status == 0
    whole = read_trace(out)
    original, calls = _Rows.add, itertools.count(1)

    def add(self: _Rows, *args: Any) -> None:
        if next(calls) == 6 * (NUM_NEW + 2) + 4:  # in the fourth layer of the second's third pass
            raise KeyboardInterrupt
        original(self, *args)

    monkeypatch.setattr(_Rows, "add", add)
    result = cli("trace", "--prompts", prompts, "--out", out, *CPU)
    assert (result.status, result.out) == (130, "")
    found = read_trace(out)
    assert f"stopped; what was recorded is in {out}: {len(found.ids)} tokens" in result.err
    num_kept = int((whole.seq == 0).sum() + ((whole.seq == 1) & (whole.phase == 0)).sum() + 1)
    assert np.array_equal(found.ids, whole.ids[:num_kept])


@uses_a_model
def test_a_prompt_that_is_too_long_is_placed_before_any_is_answered(
    tmp_path: Path, cli: Cli, saved_model: Path, answers: list[dict[str, Any]]
) -> None:
    file, out = tmp_path / "p.txt", tmp_path / "t.npz"
    file.write_text("short\n\n" + "x" * 200 + "\nnever reached\n")
    result = cli("trace", saved_model, "--prompts", file, "--out", out, *CPU)
    assert_one_line(result, f"--prompts {file}, line 3: 200 tokens of prompt and 6 new ones are")
    assert not out.exists()
    out.write_bytes(b"mine")
    assert_one_line(cli("trace", saved_model, "--prompts", file, "--out", out, *CPU), "line 3: 200")
    assert out.read_bytes() == b"mine"
    assert answers == []


@uses_a_model
def test_a_fault_on_the_way_keeps_what_was_recorded(
    tmp_path: Path, cli: Cli, saved_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotexperts.cli.generate import Session
    from hotexperts.errors import CheckpointError

    original = Session.answer

    def answer(self: Session, prompt: str, **how: Any) -> dict[str, Any]:
        if prompt == "broken":
            raise CheckpointError("the disk says no: look at it")
        return original(self, prompt, **how)

    monkeypatch.setattr(Session, "answer", answer)
    file, out = tmp_path / "p.txt", tmp_path / "t.npz"
    file.write_text("short\nbroken\nnever reached\n")
    result = cli("trace", saved_model, "--prompts", file, "--out", out, *CPU)
    assert_one_line(result, f"--prompts {file}, line 2: the disk says no: look at it")
    assert f"what was recorded before is in {out}: 10 tokens" in result.err
    assert len(read_trace(out).ids) == 10


@uses_a_model
def test_prompts_on_stdin(
    tmp_path: Path, cli: Cli, saved_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\ncde\n"))
    out = tmp_path / "t.npz"
    assert cli("trace", saved_model, "--prompts", "-", "--out", out, *CPU).status == 0
    assert read_trace(out).seq.tolist() == [0] * 7 + [1] * 8


@uses_a_model
def test_models_that_cannot_be_recorded(
    model_folder: Path, prompts: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    argv = ("trace", model_folder, "--prompts", prompts, "--out", tmp_path / "t.npz", *CPU)
    with monkeypatch.context() as patch:
        patch.setattr(transformers.OlmoeModel, "_can_record_outputs", {})
        patch.setattr(transformers.OlmoeForCausalLM, "_can_record_outputs", {}, raising=False)
        patch.setattr(transformers.OlmoePreTrainedModel, "_can_record_outputs", {})
        assert_one_line(
            cli(*argv, "--logits"),
            "OlmoeForCausalLM does not say where the router logits of model.layers.0.mlp.experts "
            "are: record without logits",
        )
        assert_one_line(cli(*argv, "--guesses"), "mlp.experts are: record without guesses")
    with monkeypatch.context() as patch:
        patch.setattr("hotexperts.integrations.norms.NORMS_BEFORE_EXPERTS", ())
        assert_one_line(
            cli(*argv, "--guesses"),
            "OlmoeForCausalLM does not name the norm before the router of model.layers.1.mlp.exp",
        )
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(model_folder)
    assert_one_line(cli(*argv), "LlamaForCausalLM has no experts")
    assert not (tmp_path / "t.npz").exists()


@pytest.mark.parametrize("kind", ["uniform", "zipf", "phases", "fitted"])
def test_synthetic(kind: str, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "t.npz"
    result = cli("trace", "--synthetic", kind, *NUMBERS, "--seed", 7, "--out", out)
    assert result == (0, f"{out}: 15 tokens, 2 layers, 4 of 16 experts\n", "")
    trace = read_trace(out)
    assert isinstance(trace, Trace)
    assert np.array_equal(trace.ids, np.concatenate([*generate(kind, SIZE, 7)]))
    assert trace.phase.tolist() == [1] * 15
    assert trace.seq.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert (trace.meta["n_experts"], trace.meta["k"]) == (16, 4)
    assert trace.meta["source"] == f"hotexperts.simulate.generate, {kind}, seed 7"
    rows = cli("simulate", out, "--cache-size", 8, "--policy", "lru", "--json", "-")
    assert json.loads(rows.out)[0]["demands"] == 15 * 2 * 4


def test_bad_options(prompts: Path, tmp_path: Path, cli: Cli) -> None:
    out = ("--out", tmp_path / "t.npz")
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    latin = tmp_path / "latin.txt"
    latin.write_bytes("é".encode("latin-1"))
    drawn, recorded = ("--synthetic", "zipf", *out), ("--prompts", prompts, *out)
    for argv, message in (
        (out, "give --prompts FILE with one prompt a line, or --synthetic KIND"),
        (("--prompts", prompts), "give --out FILE.npz"),
        (("--prompts", tmp_path / "no.txt", *out), "no.txt cannot be read (No such file or dir"),
        (
            ("--prompts", tmp_path, *out),
            "cannot be read (a folder is there, and a file was wanted): give a file",
        ),
        (("--prompts", empty, *out), "empty.txt holds no text: give one prompt a line"),
        (("--prompts", latin, *out), "latin.txt is not valid utf-8: give it in that"),
        (("--prompts", prompts, "--out", tmp_path / "a/t.npz"), "no such folder: make it"),
        (("--prompts", prompts, "--out", "t.csv"), "t.csv: end the name in .npz"),
        ((*recorded, "--cache-mode", "gpu"), "cache_mode is 'gpu'"),
        ((*recorded, "--expert-cache-size", "0"), "at least 1 slot"),
        ((*recorded, "--tokens", 3), "--tokens is for --synthetic: leave it out"),
        ((*drawn, "--logits"), "--logits is for recording a model: leave it out"),
        ((*drawn, "--guesses"), "--guesses is for recording a model: leave it out"),
        (("some/model", *drawn), "MODEL is for recording a model"),
        (("--synthetic", "normal", *out), "'normal': choose one of uniform, zipf, phases, fitted"),
        ((*drawn, "--top-k", 200), "200 experts a token of 128: give fewer"),
    ):
        assert_one_line(cli("trace", *argv), message)
    assert cli("trace", *drawn, "--sequences", 0).status == 2
    assert cli("trace", *drawn, "--seed", -1).status == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *("empty.txt", "latin.txt", "prompts.txt")
    ]


def test_help_needs_no_numpy() -> None:
    code = "import sys; from hotexperts.cli.main import main; main(['trace', '--help'])"
    code += "; assert 'numpy' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
