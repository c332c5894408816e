"""`hotexperts report`, as a user calls it; in a browser too, where there is one."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Cli, Result
from hotexperts.simulate import Trace, replay, write_trace
from page.test_page import EVIL, assert_needs_nothing, checked
from simulate.models import lettered

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
TWICE = lettered("a b A B A C B", "c A C A B")


def trace_file(path: Path, **meta: Any) -> Path:
    write_trace(Trace(TWICE.ids, TWICE.phase, TWICE.seq, {**TWICE.meta, **meta}), path)
    return path


def run_data(**changes: Any) -> dict[str, Any]:
    """What `run --json` prints, of one layer."""
    counters = {"hits": 3, "misses": 1, "evictions": 1, "bytes_moved": 2048, "hit_rate": 0.75}
    return {
        "model": "m",
        "model_class": "OlmoeForCausalLM",
        "device": "cpu",
        "dtype": "bfloat16",
        "cache": {
            "capacity": 2,
            "num_experts": 8,
            "num_layers": 1,
            "policy": "adv",
            "store": "ram",
            "mode": "host",
            "mode_reason": "host: no CUDA device",
            "reason": "as asked",
        },
        "prompt": "p",
        "num_prompt_tokens": 2,
        "text": "t",
        "token_ids": [1, 2],
        "seconds": {"load": 1.0, "prefill": 0.5, "decode": 0.25},
        "decode_tokens_per_second": 4.0,
        "stats": counters,
        "layers": [{"name": "layers.0", **counters}],
        "memory": dict.fromkeys(
            ("slots_nbytes", "banks_nbytes", "other_nbytes", "host_nbytes"), 1024
        )
        | {"peak_device_nbytes": None},
        **changes,
    }


def saved(data: Any, path: Path) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def assert_one_line(result: Result, message: str) -> None:
    assert (result.status, result.out) == (2, ""), result
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert message in result.err


def texts(page: Path) -> str:
    return " ".join(" ".join(checked(page.read_text()).texts).split())


def test_the_page_of_a_trace(tmp_path: Path, cli: Cli) -> None:
    trace, page = trace_file(tmp_path / "t.npz", expert_nbytes=2**20), tmp_path / "page.html"
    result = cli("report", trace, "-o", page, "--cache-size", "2,4", "--policy", "lfu,belady")
    assert (result.status, result.err) == (0, "")
    assert result.out == f"{page}: {page.stat().st_size:,} bytes\n"
    found = checked(page.read_text())
    assert_needs_nothing(found)
    said = texts(page)
    assert "9 of decode, 3 of prompts" in said
    misses = replay(TWICE, "lfu", 2).total
    assert f"lfu 1 2 {100 * misses.hit_rate:.1f} %" in said
    assert f"{misses.misses} MiB" in said
    assert "When misses come, with 2 slots a layer" in said
    names = [tag for tag, _ in found.elements]
    assert names.count("svg") == 5, "curves, two maps of use, the timeline and where it misses"
    assert names.count("polyline") == 3 + 2, "lru, belady and lfu, then lfu and lru in time"
    assert "MiB a step" in said


def test_without_a_size_bytes_are_not_known(tmp_path: Path, cli: Cli) -> None:
    trace, page = trace_file(tmp_path / "t.jsonl"), tmp_path / "page.html"
    assert cli("report", trace, "-o", page).status == 0
    assert "The size of an expert is not known: give --expert-mb" in texts(page)
    assert cli("report", trace, "-o", page, "--expert-mb", 1).status == 0
    assert "MiB a step" in texts(page)


def test_the_page_of_a_run(tmp_path: Path, cli: Cli) -> None:
    page = tmp_path / "page.html"
    assert cli("report", saved(run_data(), tmp_path / "run.json"), "-o", page).status == 0
    assert_needs_nothing(checked(page.read_text()))
    said = texts(page)
    for part in (
        "m (OlmoeForCausalLM, bfloat16)",
        "2 of 8 experts in each of 1 layers: as asked",
        "adv, run by the host: no CUDA device",
        "75.0 % hits: 3 hits, 1 misses, 1 evictions",
        "4 tokens/s",
        "layers.0 3 1 1 2 KiB 75.0 %",
    ):
        assert part in said


@pytest.mark.transformers
def test_what_run_prints_has_a_page(saved_model: Path, tmp_path: Path, cli: Cli) -> None:
    ran = cli("run", saved_model, "--prompt", "x", "--max-new-tokens", 2, "--json")
    page = tmp_path / "page.html"
    assert cli("report", saved(ran.out, tmp_path / "run.json"), "-o", page).status == 0
    assert "model.layers.1.mlp.experts" in texts(page)


def test_what_simulate_writes_has_a_page(tmp_path: Path, cli: Cli) -> None:
    trace, rows, page = trace_file(tmp_path / "t.npz"), tmp_path / "r.json", tmp_path / "p.html"
    argv = ("--cache-size", "2,4", "--batch", "1,2", "--json", rows)
    assert cli("simulate", trace, *argv).status == 0
    assert cli("report", rows, "-o", page).status == 0
    found = checked(page.read_text())
    assert_needs_nothing(found)
    names = [tag for tag, _ in found.elements]
    assert (names.count("svg"), names.count("tr")) == (2, 2 * (1 + 2 * 3))
    rate = replay(TWICE, "adv", 4).total.hit_rate
    assert f"adv 4 {100 * rate:.1f} %" in texts(page)


def test_what_files_say_is_only_text(tmp_path: Path, cli: Cli) -> None:
    page = tmp_path / "page.html"
    data = run_data(model=EVIL, prompt=EVIL, text="\ud800" + EVIL)
    data["layers"][0]["name"] = EVIL
    assert cli("report", saved(data, tmp_path / "run.json"), "-o", page).status == 0
    found = checked(page.read_text())
    assert_needs_nothing(found)
    assert found.texts.count(EVIL) == 2, "the prompt and the layer"
    trace = trace_file(tmp_path / "t.jsonl", model=EVIL)
    assert cli("report", trace, "-o", page).status == 0
    found = checked(page.read_text())
    assert_needs_nothing(found)
    assert EVIL in found.texts


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "is no JSON ("),
        ('{"token_ids": NaN}', "NaN is no number of JSON's"),
        ("[" * 100_000, "nested too deeply"),
        ("3", "the whole file: a list with objects in it was wanted"),
        ("[]", "the whole file: a list with objects in it was wanted"),
        ([{}, 3], "field '[1]': 3: an object was wanted"),
        ([{"trace": "t"}], "field '[0].batch': missing"),
        ([{"trace": 3, "batch": 1}], "field '[0].trace': 3: text was wanted"),
        ({"hits": 3}, "has no field 'token_ids' (of `run --json`)"),
        (run_data(cache=[]), "field 'cache': []: an object was wanted"),
        (run_data(layers=[]), "field 'layers': a list with objects in it was wanted"),
        (run_data(layers=[{"name": "a"}]), "field 'layers[0].hit"),
        (run_data(token_ids="ab"), "field 'token_ids': 'ab': a list was wanted"),
        (run_data(decode_tokens_per_second=True), "True: a number, 0 or more was wanted"),
        (run_data(num_prompt_tokens=-1), "-1: a whole number, 0 or more was wanted"),
        (run_data(num_prompt_tokens=1.5), "1.5: a whole number, 0 or more was wanted"),
        (run_data(seconds={"load": "x"}), "field 'seconds.load': 'x': a number, 0 or more"),
        (run_data(stats={"hit_rate": 7}), "field 'stats.hit_rate': 7: a part of 1, or null"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_malformed_json_names_file_and_field(
    data: Any, message: str, tmp_path: Path, cli: Cli
) -> None:
    file, page = saved(data, tmp_path / "bad.json"), tmp_path / "page.html"
    result = cli("report", file, "-o", page)
    assert_one_line(result, message)
    assert str(file) in result.err
    assert ": give " in result.err, "what to do"
    assert not page.exists()


def test_json_that_is_no_text_is_an_error(tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(b'{"model": "\xff"}')
    assert_one_line(cli("report", file, "-o", tmp_path / "p.html"), "is no JSON ('utf-8' codec")
    file.write_text("9" * 5000)
    assert_one_line(cli("report", file, "-o", tmp_path / "p.html"), "is no JSON (")
    with file.open("wb") as sparse:
        sparse.truncate((64 << 20) + 1)
    assert_one_line(cli("report", file, "-o", tmp_path / "p.html"), "has over 64 MiB")


def test_malformed_traces_name_file_and_field(tmp_path: Path, cli: Cli) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"token": 0, "layer": 0}\n')
    message = "bad.jsonl: line 1, field 'experts': missing"
    assert_one_line(cli("report", bad, "-o", tmp_path / "p.html"), message)
    trace_file(bad, expert_nbytes="big")
    message = "bad.jsonl: meta, field 'expert_nbytes': 'big'"
    assert_one_line(cli("report", bad, "-o", tmp_path / "p.html"), message)


def test_wrong_options_are_one_line(tmp_path: Path, cli: Cli) -> None:
    trace, run = trace_file(tmp_path / "t.npz"), saved(run_data(), tmp_path / "run.json")
    for argv, message in (
        ((trace, "-o", "nowhere/p.html"), "--out nowhere/p.html: no such folder"),
        ((trace, "-o", tmp_path), "is a folder: name a file in it"),
        ((trace, "-o", tmp_path / "p.pdf"), "end the name in .html"),
        ((tmp_path / "x.npz", "-o", tmp_path / "p.html"), "no such file: give a trace, or"),
        (
            (Path(__file__), "-o", tmp_path / "p.html"),
            "unknown kind: give a trace (.npz, .jsonl, .csv)",
        ),
        ((run, "-o", tmp_path / "p.html", "--jobs", 2), "--jobs is for a trace"),
        ((run, "-o", tmp_path / "p.html", "--expert-mb", 2), "--expert-mb is for a trace"),
        ((trace, "-o", tmp_path / "p.html", "--policy", "best"), "unknown policy 'best'"),
        ((trace, "-o", tmp_path / "p.html", "--cache-size", 99), "give 1 to 8"),
    ):
        assert_one_line(cli("report", *argv), message)
    assert cli("report", trace).status == 2


@pytest.mark.skipif(BROWSER is None, reason="no browser: install chromium")
@pytest.mark.parametrize("width", [1150, 420])
def test_a_browser_shows_it(width: int, tmp_path: Path, cli: Cli) -> None:
    trace, page = trace_file(tmp_path / "t.npz", model=EVIL), tmp_path / "page.html"
    assert cli("report", trace, "-o", page).status == 0
    shot, options = tmp_path / "shot.png", ("--headless", "--no-sandbox", "--disable-gpu")
    command = [str(BROWSER), *options, f"--user-data-dir={tmp_path / 'profile'}"]
    address = [f"--window-size={width},1800", page.as_uri()]
    done = subprocess.run(
        [*command, "--dump-dom", *address], capture_output=True, text=True, timeout=120, check=True
    )
    assert EVIL in checked(done.stdout).texts
    assert "<script" not in done.stdout
    subprocess.run(
        [*command, f"--screenshot={shot}", *address], capture_output=True, timeout=120, check=True
    )
    data = shot.read_bytes()
    assert struct.unpack(">I", data[16:20]) == (width,)
    assert len(set(zlib.decompress(_pixels(data)))) > 64, "a picture with many colours"


def _pixels(data: bytes) -> bytes:
    """What the chunks of a PNG hold, compressed."""
    found, at = b"", 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            found += data[at + 8 : at + 8 + size]
        at += 12 + size
    return found
