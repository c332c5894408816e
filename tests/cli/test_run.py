from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cli.conftest import CHARACTERS, Cli, save_tokenizer
from hotexperts.cli.generate import Session
from hotexperts.errors import StorageError
from hotexperts.integrations.transformers.pieces import TextPieces
from hotexperts.policy import DEFAULT_POLICY
from integrations import zoo

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]

PROMPT = "def read(path):"
NUM_NEW = 12
CPU = ("--device", "cpu", "--max-new-tokens", NUM_NEW)


@pytest.fixture(scope="module")
def greedy_ids(saved_model: Path) -> list[int]:
    """What the resident model says."""
    model = AutoModelForCausalLM.from_pretrained(saved_model, experts_implementation="eager")
    prompt = torch.tensor([[1 + CHARACTERS.index(c) for c in PROMPT]])
    out = model.generate(prompt, max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0)
    return out[0, len(PROMPT) :].tolist()


def _text(ids: list[int]) -> str:
    return "".join(CHARACTERS[i - 1] for i in ids if i)


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("store", ["ram", "file"])
def test_greedy_output_is_the_resident_model_s(
    size: int, store: str, saved_model: Path, greedy_ids: list[int], cli: Cli
) -> None:
    options = ("--expert-cache-size", size, "--expert-store", store, "--json", *CPU)
    result = cli("run", saved_model, "--prompt", PROMPT, *options)
    data = result.json
    assert (result.status, result.err) == (0, "")
    assert data["token_ids"] == greedy_ids
    assert data["text"] == _text(greedy_ids)
    assert data["num_prompt_tokens"] == len(PROMPT)
    why = {"ram": "no CUDA device", "file": "experts stay in the file"}[store]
    assert data["cache"] == {
        "capacity": size,
        "num_experts": zoo.NUM_EXPERTS,
        "num_layers": 2,
        "policy": DEFAULT_POLICY,
        "store": store,
        "held": "",
        "store_reason": None,
        "packing": "none",
        "packing_report": "",
        "expert_dtype": "none",
        "dequantised": "",
        "relative_errors": {},
        "prefetch": "off",
        "mode": "host",
        "mode_reason": f"host: {why}",
        "reason": f"{size} slots a layer as asked",
    }


def test_quantised_experts_are_reported_with_their_error(saved_model: Path, cli: Cli) -> None:
    options = ("--expert-cache-size", 3, "--dtype", "bfloat16", "--expert-dtype", "int8", *CPU)
    command = ("run", saved_model, "--prompt", PROMPT, "--max-new-tokens", 3, *options)
    cache = cli(*command, "--json").json["cache"]
    assert cache["expert_dtype"] == "int8"
    errors = cache["relative_errors"].values()
    assert len(errors) == cache["num_layers"]
    assert all(0.003 < error < 0.01 for error in errors)
    least, most = min(errors), max(errors)
    said = f"lossy: relative error {least:.2g} to {most:.2g} a layer"
    assert said in cache["packing_report"]
    text = " ".join(cli(*command).out.split())
    assert said in text


@pytest.mark.interpret
def test_the_device_may_run_the_policy(saved_model: Path, kernel_device: str, cli: Cli) -> None:
    options = ("--expert-cache-size", 3, "--policy", "lfu", "--device", kernel_device)
    command = ("run", saved_model, *options)
    some = ("--prompt", PROMPT, "--max-new-tokens", 3, "--json")  # kernels are interpreted
    host = cli(*command, *some, "--cache-mode", "host").json
    device = cli(*command, *some, "--cache-mode", "device").json
    assert (host["cache"]["mode"], device["cache"]["mode"]) == ("host", "device")
    assert host["cache"]["mode_reason"] is device["cache"]["mode_reason"] is None
    assert device["token_ids"] == host["token_ids"]
    assert device["stats"]["misses"] > 0
    one = ("--prompt", "x", "--max-new-tokens", 1)
    report = cli(*command, *one, "--cache-mode", "device")
    assert (report.status, report.err) == (0, "")
    assert "lfu, run by the device" in " ".join(report.out.split())


@pytest.mark.interpret
def test_prefetches_are_in_every_report(
    saved_model: Path, kernel_device: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = keep_caches(monkeypatch)
    options = ("--expert-cache-size", 3, "--device", kernel_device, "--cache-mode", "device")
    command = ("run", saved_model, *options, "--prompt", "def read", "--max-new-tokens", 5)
    off, data = (cli(*command, "--prefetch", how, "--json").json for how in ("off", "router"))
    assert (off["cache"]["prefetch"], data["cache"]["prefetch"]) == ("off", "router")
    assert data["token_ids"] == off["token_ids"]
    assert off["memory"]["lift_nbytes"] == data["memory"]["lift_nbytes"] == 0
    assert not any("prefetch" in name for name in off["stats"])
    stats, nbytes = data["stats"], caches[1].providers[0].store.form.nbytes
    assert stats["prefetches"] >= stats["prefetch_hits"] > 0
    assert stats["prefetch_bytes"] == stats["prefetches"] * nbytes, "interpreted, nothing is cut"
    assert stats["prefetch_saved_bytes"] == stats["prefetch_hits"] * nbytes
    first, second = data["layers"]
    assert (first["prefetches"], first["prefetching_layers"]) == (0, 0), "nobody is before it"
    assert (second["prefetches"], second["prefetching_layers"]) == (stats["prefetches"], 1)
    assert stats["prefetching_layers"] == 1
    issued, used = stats["prefetches"], stats["prefetch_hits"]
    said = f"{issued} experts begun ahead, {used} of them used"
    report = " ".join(cli(*command, "--prefetch", "router").out.split())
    assert f"prefetch {said}" in report
    assert "1 layers guess now" in report
    assert "lift" not in report
    assert "layer hits misses ahead used guessed hit rate" in report
    assert second["name"] in report, "not cut off"
    file, page = tmp_path / "run.json", tmp_path / "page.html"
    file.write_text(json.dumps(data))
    assert cli("report", file, "-o", page).status == 0
    assert said in page.read_text()
    assert re.search(r">off<.*>on<", page.read_text(), flags=re.DOTALL)


@pytest.mark.interpret
def test_lift_tables_are_in_the_report(saved_model: Path, kernel_device: str, cli: Cli) -> None:
    options = ("--expert-cache-size", 3, "--device", kernel_device, "--cache-mode", "device")
    command = ("run", saved_model, *options, "--prompt", "def read", "--max-new-tokens", 5)
    off, data = (cli(*command, "--prefetch", how, "--json").json for how in ("off", "lift"))
    assert data["cache"]["prefetch"] == "lift"
    assert data["token_ids"] == off["token_ids"]
    assert data["stats"]["prefetches"] > 0
    num_experts = data["cache"]["num_experts"]
    nbytes = 4 * ((num_experts + 1) ** 2 + (num_experts + 2) * num_experts)
    assert data["memory"]["lift_nbytes"] == nbytes, "of one pair of layers"
    report = cli(*command, "--prefetch", "lift")
    assert f"{nbytes} B lift tables, " in " ".join(report.out.split())
    assert report.err == ""


def test_a_prefetch_that_cannot_take_effect_is_refused(saved_model: Path, cli: Cli) -> None:
    for options, message in (
        (("--prefetch", "always"), "prefetch is 'always': use 'off', 'router' or 'lift'"),
        (("--prefetch", "router"), "(host: no CUDA device): use prefetch 'off'"),
        (("--prefetch", "router", "--cache-mode", "host"), "(cache_mode host): use prefetch 'off'"),
    ):
        bench = ("bench", "--prompt-tokens", 4, "--steps", 3)
        for command in (("run", "--prompt", "x"), ("verify",), bench):
            result = cli(*command, saved_model, "--device", "cpu", *options)
            assert (result.status, result.out) == (2, ""), command
            assert message in result.err.splitlines()[-1]


def keep_caches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The caches of all answers from now on."""
    caches = []
    answer = Session.answer

    def spy(self: Session, *args: Any, **kwargs: Any) -> Any:
        caches.append(self._model.expert_cache)
        return answer(self, *args, **kwargs)

    monkeypatch.setattr(Session, "answer", spy)
    return caches


def test_the_report_is_what_the_counters_say(
    saved_model: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = keep_caches(monkeypatch)
    data = cli(
        "run", saved_model, "--prompt", PROMPT, "--expert-cache-size", 3, "--json", *CPU
    ).json
    (cache,) = caches
    stats = data["stats"]
    assert {name: stats[name] for name in cache.stats.as_dict()} == cache.stats.as_dict()
    assert stats["hit_rate"] == pytest.approx(cache.stats.hit_rate)
    for name in ("hits", "misses", "bytes_moved", "calls", "lru_hits", "best_shadow_hits"):
        assert stats[name] == sum(layer[name] for layer in data["layers"])
    assert [layer["name"] for layer in data["layers"]] == list(cache.names)
    assert stats["calls"] == 2 * NUM_NEW
    assert stats["hits"] + stats["misses"] >= 2 * (NUM_NEW - 1) * zoo.TOP_K
    row_nbytes = cache.providers[0].store.layout.row_nbytes
    assert data["memory"]["slots_nbytes"] == 2 * 3 * row_nbytes == cache.slot_nbytes
    assert data["memory"]["host_nbytes"] == 2 * 8 * row_nbytes
    assert data["memory"]["banks_nbytes"] == 2 * 3 * row_nbytes
    seconds = data["seconds"]
    assert min(seconds.values()) > 0
    assert data["decode_tokens_per_second"] == pytest.approx((NUM_NEW - 1) / seconds["decode"])


def test_text_first_then_the_report(saved_model: Path, greedy_ids: list[int], cli: Cli) -> None:
    result = cli("run", saved_model, "--prompt", PROMPT, "--expert-cache-size", 2, *CPU)
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith(PROMPT + _text(greedy_ids) + "\n")
    report = " ".join(result.out.split())
    for part in (
        "2 of 8 experts in each of 2 layers; 2 slots a layer as asked",
        f"policy {DEFAULT_POLICY}, run by the host: no CUDA device",
        "evictions), ",
        f"{NUM_NEW} tokens, first after",
        f"({len(PROMPT)} of prompt)",
        "tok/s",
        "of experts in host memory; loaded in",
        "model.layers.1.mlp.experts",
    ):
        assert part in report


def test_a_budget_is_a_budget(saved_model: Path, cli: Cli) -> None:
    options = ("--prompt", "x", "--json", "--context", 64, *CPU)
    by_gib = cli("run", saved_model, "--expert-cache-gib", 400 / 2**20, *options).json
    by_size = cli("run", saved_model, "--expert-cache-size", "400KiB", *options).json
    assert by_gib["cache"] == by_size["cache"]
    assert "400 KiB" in by_gib["cache"]["reason"]
    memory = by_gib["memory"]
    device_nbytes = memory["slots_nbytes"] + memory["banks_nbytes"] + memory["other_nbytes"]
    assert device_nbytes <= 400 * 2**10


def test_auto_takes_all_where_all_fits(saved_model: Path, cli: Cli) -> None:
    data = cli("run", saved_model, "--prompt", "x", "--json", *CPU).json
    assert data["cache"]["capacity"] == 8


def test_a_dash_reads_stdin(saved_model: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    data = cli("run", saved_model, "--prompt", "-", "--expert-cache-size", 2, "--json", *CPU).json
    assert data["prompt"] == PROMPT


def test_a_seed_repeats_what_a_temperature_draws(saved_model: Path, cli: Cli) -> None:
    def draw(seed: int) -> list[int]:
        options = ("--temperature", 5.0, "--seed", seed, "--expert-cache-size", 4, "--json")
        return cli("run", saved_model, "--prompt", PROMPT, *options, *CPU).json["token_ids"]

    assert draw(1) == draw(1) != draw(2)


def test_chat_applies_the_template_where_there_is_one(model_folder: Path, cli: Cli) -> None:
    save_tokenizer(model_folder, chat_template="Q:{{ messages[0]['content'] }}A:")
    options = ("--prompt", "hello", "--expert-cache-size", 2, "--json", *CPU)
    default = cli("run", model_folder, *options).json
    plain = cli("run", model_folder, "--no-chat", *options).json
    assert (default["chat"], default["num_prompt_tokens"]) == (True, len("Q:helloA:"))
    assert (plain["chat"], plain["num_prompt_tokens"]) == (False, len("hello"))


def test_a_prompt_longer_than_the_tokenizer_expects_is_one_line() -> None:
    command = [sys.executable, "-m", "hotexperts", "run", "--prompt", "word " * 2000, *CPU]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()  # without a warning of Transformers
    assert "more than the context of 1024" in line


@pytest.mark.parametrize("ending", ["exit\n", ""], ids=["exit", "end of input"])
def test_a_loop_keeps_the_cache_and_goes_on_after_an_error(
    ending: str, saved_model: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = "y" * 80
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"ab\n\n{too_long}\nab\n{ending}"))
    options = ("--expert-cache-size", 8, "--context", 64, *CPU)
    result = cli("run", saved_model, "--interactive", *options)
    assert result.status == 0
    reports = [line for line in result.out.splitlines() if line.startswith(f"[{NUM_NEW} tokens")]
    assert len(reports) == 2
    assert ", 0 misses, 0 evictions), 0 B moved" in reports[1], "the same again, all resident"
    assert "80 tokens of prompt and 12 new ones are more than the context of 64" in result.err


def test_ctrl_c_ends_a_loop(saved_model: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "answer", interrupt)
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\nab\n"))
    assert cli("run", saved_model, "--interactive", "--expert-cache-size", 8, *CPU).status == 0


class _Utf8:
    """Ids are bytes, as in byte-level tokenizers."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")


def test_no_character_is_shown_before_its_last_byte() -> None:
    shown: list[str] = []
    pieces = TextPieces(_Utf8(), shown.append)
    pieces.put(torch.tensor([[1, 2, 3]]))
    for byte in "né €\xff".encode()[:-1]:
        pieces.put(torch.tensor([byte]))
    assert shown == ["n", "é", " ", "€"]
    pieces.end()
    assert shown[-1] == "\N{REPLACEMENT CHARACTER}", "a cut character is shown as such"
    assert len(pieces.times) == len(pieces.token_ids) == 8


@pytest.mark.interpret
@pytest.mark.parametrize("mode", ["host", "device"])
def test_a_state_makes_the_next_run_warm(
    mode: str, saved_model: Path, kernel_device: str, cli: Cli, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    arguments = ("run", saved_model, "--prompt", PROMPT, "--json", "--expert-cache-size", 8)
    arguments += ("--device", kernel_device, "--max-new-tokens", 2, "--cache-mode", mode)
    first = cli(*arguments, "--expert-cache-state", state)
    assert f"note: no {state} yet: the cache starts empty" in first.err
    assert f"note: saved for the next start: {state}" in first.err
    second = cli(*arguments, "--expert-cache-state", state)
    assert first.json["stats"]["misses"] > 0
    assert f"note: the cache starts as {state} says" in second.err
    assert second.json["stats"]["misses"] == 0
    assert second.json["text"] == first.json["text"]
    refused = cli(*arguments, "--policy", "lru", "--expert-cache-state", state)
    assert refused.status == 2
    assert "saved with policy adv, and this cache has lru: take that one (--policy)" in refused.err
    os.mkfifo(tmp_path / "pipe")  # which nobody else opens: not to be waited for
    for name, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "no/s", "no such folder"),
        (tmp_path / "pipe", f"--expert-cache-state {tmp_path}/pipe: a pipe is there: name a file"),
    ):
        early = cli(*arguments, "--expert-cache-state", name)
        assert (early.status, early.out) == (2, "")
        assert message in early.err


def _breaking_off(error: BaseException, text: str) -> Any:
    """In place of `Session.answer`: text comes, and then an error."""

    def answer(self: Session, prompt: str, emit: Any, *, echo: bool = False) -> Any:
        for piece in text:
            emit(piece)
        raise error

    return answer


@pytest.mark.parametrize(
    ("text", "shown"), [("half an ans", "half an ans\n"), ("a line\n", "a line\n"), ("", "")]
)
def test_an_error_in_mid_answer_has_a_line_of_its_own(
    text: str, shown: str, saved_model: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "answer", _breaking_off(StorageError("gone"), text))
    result = cli("run", saved_model, "--prompt", PROMPT, *CPU)
    assert (result.status, result.out) == (2, shown)
    assert result.err == "error: gone\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\nexit\n"))
    result = cli("run", saved_model, "--interactive", *CPU)
    assert (result.status, result.out.removeprefix("> ")) == (0, shown)
    assert "error: gone\n" in result.err


def test_an_interrupt_in_mid_answer_ends_the_line(
    saved_model: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "answer", _breaking_off(KeyboardInterrupt(), "half"))
    result = cli("run", saved_model, "--prompt", PROMPT, *CPU)
    assert (result.status, result.out) == (130, "half\n")


def test_counters_are_served_while_it_runs(saved_model: Path, cli: Cli) -> None:
    pytest.importorskip("prometheus_client")
    result = cli("run", saved_model, "--prompt", PROMPT, *CPU, "--metrics-port", 0, "--json")
    assert result.status == 0
    assert re.match(r"note: counters at http://127\.0\.0\.1:\d+/metrics\n", result.err)
