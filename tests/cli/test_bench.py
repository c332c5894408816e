"""`hotexperts bench` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.test_models import tiny
from bench.test_plain import saved_trace
from cli.conftest import Cli, save_tokenizer
from cli.test_page import assert_one_line, texts
from cli.test_verify import one_wrong_weight  # noqa: F401  # a fixture
from hotexperts.bench.bound import bound
from hotexperts.bench.shapes import SHAPES
from hotexperts.cli.bench_report import _notes, bench_report
from integrations import zoo

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]

SHORT = ("--device", "cpu", "--prompt-tokens", 6, "--steps", 4)


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SHAPES, "Tiny", tiny("OLMoE-1B-7B"))
    return "tiny"


def bench(cli: Cli, *argv: object) -> dict[str, Any]:
    result = cli("bench", *argv, *SHORT, "--json")
    assert (result.status, result.err) == (0, "")
    return result.json


def test_a_model_through_two_caches(saved_model: Path, cli: Cli) -> None:
    data = bench(cli, saved_model, "--expert-cache-size", "2,8", "--batch", "1,2")
    rows = data["rows"]
    assert [(row["capacity"], row["batch"]) for row in rows] == [
        (capacity, batch) for capacity in (None, 2, 8) for batch in (1, 2)
    ]
    assert (data["benchmark"], data["num_experts"], data["steps"]) == ("hotexperts bench", 8, 4)
    assert data["machine"]["versions"]["torch"]
    for row in rows[2:]:
        assert row["verified"] is True
        assert [group["name"] for group in row["groups"]] == [
            *("code", "mathematics", "dialogue"),
            "prose",
        ], "the first is cold at first, and warm at the end"
        assert row["cold"]["num_steps"] == 4
        assert row["warm"]["num_steps"] == 4 * 4
    full = rows[4]
    assert rows[2]["warm"]["hit_rate"] < full["warm"]["hit_rate"]
    assert rows[2]["warm"]["bytes_per_step"] > full["warm"]["bytes_per_step"]


@pytest.mark.interpret
def test_prefetches_are_counted(saved_model: Path, kernel_device: str, cli: Cli) -> None:
    argv = ("bench", saved_model, "--expert-cache-size", 3, "--domain", "prose", "--steps", 3)
    argv += ("--prompt-tokens", 4, "--cache-mode", "device", "--prefetch", "router")
    data = cli(*argv, "--device", kernel_device, "--json").json
    row = data["rows"][-1]
    warm = row["warm"]
    assert (row["prefetch"], row["verified"]) == ("router", True)
    issued, used = warm["prefetches_per_step"], warm["prefetch_hits_per_step"]
    assert issued >= used > 0
    assert warm["prefetch_bytes_per_step"] == pytest.approx(issued * data["expert_nbytes"])
    assert warm["prefetch_saved_bytes_per_step"] == pytest.approx(used * data["expert_nbytes"])
    notes = " ".join(_notes(data))
    assert f"3 slots, warm, a step: {issued:.1f} experts begun ahead, {used:.1f} used (" in notes


@pytest.mark.parametrize("family", ["gemma4", "gpt_oss", "deepseek_v4"])
def test_families_that_name_things_in_other_ways(family: str, tmp_path: Path, cli: Cli) -> None:
    if cause := zoo.known_exception(family):
        pytest.skip(cause)
    folder = zoo.save_checkpoint(family, tmp_path)
    save_tokenizer(folder)
    row = bench(cli, folder, "--expert-cache-size", 3, "--domain", "prose")["rows"][-1]
    assert row["verified"] is True
    assert row["warm"]["hit_rate"] > 0


def test_figures_of_a_row_fit_together(saved_model: Path, cli: Cli) -> None:
    resident, cached = bench(cli, saved_model, "--expert-cache-size", 2, "--batch", 3)["rows"]
    part, link = cached["warm"], cached["link_gb_s"]
    base = resident["warm"]
    assert part["tokens_per_s"] == pytest.approx(3e3 / part["step_ms"])
    assert part["prefill_tokens_per_s"] == pytest.approx(3e3 * 6 / part["prefill_ms"])
    expected = bound(part["step_ms"], base["step_ms"], part["bytes_per_step"], link)
    assert part["percent_of_bound"] == pytest.approx(expected.percent_of_bound)
    assert part["serial_floor_ms"] == pytest.approx(expected.serial_floor_ms)
    expected = bound(part["prefill_ms"], base["prefill_ms"], part["prefill_bytes"], link)
    assert part["prefill_percent_of_bound"] == pytest.approx(expected.percent_of_bound)
    spread = part["step_ms_spread"]
    assert spread["min"] <= part["step_ms"] <= spread["max"]


def test_a_shape_repeats_a_recording(tiny_shape: str, tmp_path: Path, cli: Cli) -> None:
    saved_trace(tmp_path / "t.npz", num_tokens=10)
    argv = ("--shape", tiny_shape, "--layers", 2, "--traces", tmp_path, "--sequences", 2)
    data = bench(cli, *argv, "--expert-cache-size", "4,8")
    assert (data["num_layers"], data["routing"]) == (2, "t.npz")
    assert data["model"] == "shape of Tiny, random weights"
    few, all_ = data["rows"][1:]
    assert few["verified"] is True
    assert [group["name"] for group in few["groups"]] == ["sequence 1", "sequence 0"]
    assert 0 < few["warm"]["hit_rate"] < all_["warm"]["hit_rate"]
    again = bench(cli, *argv, "--expert-cache-size", "4,8")["rows"]
    assert [row["warm"]["hit_rate"] for row in again[1:]] == [
        row["warm"]["hit_rate"] for row in (few, all_)
    ], "hits are the routing's, and do not change"


@pytest.mark.interpret
def test_a_shape_s_ids_say_what_follows_them(
    tiny_shape: str, kernel_device: str, tmp_path: Path, cli: Cli
) -> None:
    """The lift table needs no router: what was recorded is enough."""
    saved_trace(tmp_path / "t.npz", num_tokens=10)
    argv = ("bench", "--shape", tiny_shape, "--layers", 2, "--traces", tmp_path, "--sequences", 1)
    argv += ("--expert-cache-size", 4, "--prompt-tokens", 3, "--steps", 3, "--json")
    argv += ("--cache-mode", "device", "--device", kernel_device)
    off, lift = (cli(*argv, *more).json["rows"][-1] for more in ((), ("--prefetch", "lift")))
    assert (lift["prefetch"], lift["verified"]) == ("lift", True)
    assert lift["warm"]["prefetches_per_step"] >= lift["warm"]["prefetch_hits_per_step"] > 0
    assert lift["warm"]["hit_rate"] == off["warm"]["hit_rate"], "the policy decides as without"


def test_what_vllm_runs_takes_no_prefetch_of_ours(cli: Cli) -> None:
    command = ("bench", "--shape", "gpt-oss-20b", "--device", "cuda", "--prefetch", "lift")
    said = "--prefetch cannot be had with --shape gpt-oss-20b, which vLLM runs: leave it out"
    assert_one_line(cli(*command), said)


def test_without_traces_routing_is_drawn(tiny_shape: str, cli: Cli) -> None:
    data = bench(cli, "--shape", tiny_shape, "--expert-cache-size", 4, "--sequences", 1)
    assert data["routing"] == "drawn, fitted"


def test_ctrl_c_shows_the_caches_that_are_done(
    saved_model: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotexperts.bench import measure

    original = measure._measure_cache

    def until(last: str) -> None:
        def measured(source: Any, wanted: Any, size: str, resident: Any) -> Any:
            if size == last:
                raise KeyboardInterrupt
            return original(source, wanted, size, resident)

        monkeypatch.setattr(measure, "_measure_cache", measured)

    argv = ("bench", saved_model, "--expert-cache-size", "2,8", *SHORT)
    until("8")
    result = cli(*argv, "--json")
    assert (result.status, result.err) == (
        130,
        "stopped; caches that were done by then are shown\n",
    )
    assert [row["capacity"] for row in result.json["rows"]] == [None, 2]
    assert result.json["stopped"] is True
    file = tmp_path / "b.json"
    file.write_text(result.out)
    assert cli("report", file, "-o", tmp_path / "p.html").status == 0
    until("none")
    whole = bench(cli, *argv[1:4], "--compare", file)
    assert {row["capacity"] for row in whole["compared"]} == {None, 2}

    until("2")
    nothing = cli(*argv)
    assert (nothing.status, nothing.out) == (130, "")


@pytest.mark.usefixtures("one_wrong_weight")
def test_a_cache_that_differs_gets_no_speed(saved_model: Path, tmp_path: Path, cli: Cli) -> None:
    argv = ("bench", saved_model, "--expert-cache-size", 2, *SHORT)
    result = cli(*argv, "--json")
    resident, cached = result.json["rows"]
    assert result.status == 1
    assert "warm" in resident
    assert cached["verified"] is False
    assert cached["first_difference"]["where"] == "layer 1"
    assert {"warm", "cold", "groups"}.isdisjoint(cached)
    file, page = tmp_path / "b.json", tmp_path / "p.html"
    file.write_text(result.out)
    assert cli("report", file, "-o", page).status == 0
    assert "2 1 differs" in texts(page)
    assert "no speed no speed no speed" in texts(page)


@pytest.mark.usefixtures("one_wrong_weight")
def test_a_difference_is_said(saved_model: Path, cli: Cli) -> None:
    argv = (saved_model, "--expert-cache-size", 2)
    result = cli("bench", *argv, *SHORT)
    said = " ".join(result.out.split())
    assert result.status == 1
    assert "2 1 DIFFERENT" in said
    assert "no speed, for the cache differs from the resident model at token position" in said


def test_without_the_resident_model_nothing_is_verified(saved_model: Path, cli: Cli) -> None:
    argv = ("--expert-cache-size", 2, "--no-resident")
    (row,) = bench(cli, saved_model, *argv)["rows"]
    assert (row["verified"], row["warm"]["percent_of_bound"]) == (None, None)
    assert row["warm"]["tokens_per_s"] > 0
    said = cli("bench", saved_model, *argv, *SHORT).out
    assert "Not verified, and no bound: the resident model was left out." in " ".join(said.split())


def test_the_table_fits_a_terminal(saved_model: Path, cli: Cli) -> None:
    result = cli("bench", saved_model, "--expert-cache-size", "2", "--batch", "1,2", *SHORT)
    assert (result.status, result.err) == (0, "")
    assert max(map(len, result.out.splitlines())) <= 80
    assert "…" not in result.out
    assert "Every cache gives the resident model's bits." in " ".join(result.out.split())
    for word in ("cold", "warm", "KiB", "%", "step ms", "load: none", "2 slots, warm hits: code"):
        assert word in result.out


def test_compared_with_an_earlier_run(saved_model: Path, tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "earlier.json"
    argv = (saved_model, "--expert-cache-size", "2", "--domain", "prose")
    earlier = bench(cli, *argv)
    file.write_text(json.dumps(earlier))
    data = bench(cli, *argv, "--compare", file)
    assert [(row["capacity"], row["start"]) for row in data["compared"]] == [
        (None, "warm"),
        (2, "cold"),
        (2, "warm"),
    ]
    last = data["compared"][-1]["tokens_per_s"]
    assert last["before"] == earlier["rows"][1]["warm"]["tokens_per_s"]
    assert last["change"] == pytest.approx(last["now"] / last["before"] - 1)
    result = cli("bench", *argv, "--compare", file, *SHORT)
    assert "Since the earlier result:" in result.out
    assert "…" not in result.out
    result = cli("bench", *argv, "--compare", file, *SHORT[:4], "--steps", 5)
    assert_one_line(result, "steps was 4, now it is 5: compare the same")


def test_what_bench_prints_has_a_page(saved_model: Path, tmp_path: Path, cli: Cli) -> None:
    file, page = tmp_path / "b.json", tmp_path / "p.html"
    data = bench(cli, saved_model, "--expert-cache-size", "2,4", "--batch", "1,2")
    file.write_text(json.dumps(data))
    assert cli("report", file, "-o", page).status == 0
    said = texts(page)
    bound_ = data["rows"][2]["warm"]["percent_of_bound"]
    assert f"{bound_:.0f} %" in said
    assert "all, resident 1 warm" in said
    assert "mathematics 4 2" in said
    data["rows"][2]["warm"]["step_ms"] = None
    file.write_text(json.dumps(data))
    result = cli("report", file, "-o", page)
    assert_one_line(result, "field 'rows[2].warm.step_ms': None: a number, 0 or more was wanted")


def test_large_figures_fit_a_terminal_too(capsys: pytest.CaptureFixture[str]) -> None:
    part = {"prefill_ms": 123456.7, "step_ms": 12345.6, "tokens_per_s": 98765.4, "hit_rate": 1.0}
    part |= {"bytes_per_step": 900 * 2**30, "percent_of_bound": 135.0}
    about = {"batch": 128, "load_seconds": 123.4, "link_gb_s": 55.0}
    rows = [{"capacity": None, **about, "warm": part}]
    rows += [{"capacity": 1024, **about, "groups": [], "cold": part, "warm": part}]
    data = dict.fromkeys(("model", "model_class", "dtype", "routing"), "x")
    data |= {"num_layers": 1, "num_experts": 2, "prompt_tokens": 3, "steps": 4, "rows": rows}
    data |= {"expert_nbytes": 1, "machine": {"cpu_cores": 2}, "domains": []}
    Console(width=80).print(bench_report(data))
    said = capsys.readouterr().out
    assert "…" not in said
    assert "none" in said
    for cell in ("123,457", "12,346", "98765.4", "100.0 %", "900 GiB", "135 %"):
        assert said.count(cell) == 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--expert-cache-size", "6GiB"],
            "6GiB: in vLLM a shape is measured with slots: give 1 to",
        ),
        (["--cache-mode", "host"], "--cache-mode cannot be had with --shape gpt-oss-20b, which"),
        (["--steps", 200000], "positions, the model has 131072: lower one"),
        ([], "--shape gpt-oss-20b is measured in vLLM, which is not installed in this environment"),
    ],
)
def test_what_vllm_has_not_is_refused(
    argv: list[object], message: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotexperts.known_versions.installed", lambda *names: None)
    assert_one_line(cli("bench", "--shape", "gpt-oss-20b", *argv), message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--expert-packing", "packed12"],
            "expert_packing 'packed12' is unpacked by kernels, which do not work here (host: no "
            "CUDA device): use expert_packing 'auto'",
        ),
        (["--cache-mode", "device"], "cache_mode 'device' cannot work here, no CUDA device: give"),
        (
            ["--expert-packing", "packed12", "--policy", "arc"],
            "(host: policy 'arc' has no kernel): use expert_packing 'auto'",
        ),
    ],
)
def test_what_kernels_cannot_do_is_refused_before_a_weight_is_drawn(
    argv: list[object], message: str, tiny_shape: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(*args: object) -> None:
        raise AssertionError("work began")

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("hotexperts.cli.benchmark.find_routing", draw)
    monkeypatch.setattr("hotexperts.bench.sources.random_model", draw)
    assert_one_line(cli("bench", "--shape", tiny_shape, *argv, *SHORT), message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shape", "gpt"], "--shape 'gpt': give one of OLMoE-1B-7B"),
        (["m", "--shape", "OLMoE-1B-7B"], "give MODEL (m) or --shape OLMoE-1B-7B, not both"),
        (["--shape", "OLMoE-1B-7B", "--expert-cache-size", 65], "a layer has only 64 experts"),
        (["--layers", 2], "--layers is for --shape: leave it out"),
        (["--traces", "x"], "--traces is for --shape: leave it out"),
        (["--shape", "gpt-oss-20b"], "--device cannot be had with --shape gpt-oss-20b, which vLLM"),
        (["--shape", "OLMoE-1B-7B", "--domain", "code"], "--domain is for a model: leave it out"),
        (["--shape", "OLMoE-1B-7B", "--dtype", "float32"], "--dtype is for a model: leave it out"),
        (
            ["--shape", "OLMoE-1B-7B", "--prefetch", "router"],
            "--prefetch router says nothing of --shape OLMoE-1B-7B, whose routers repeat what was "
            "recorded and guess nothing: take --prefetch lift, which goes by ids, or a model",
        ),
        (
            ["--shape", "OLMoE-1B-7B", "--prefetch", "lift"],
            "prefetch 'lift' runs in kernels, which do not work here (host: no CUDA device)",
        ),
        (["--shape", "OLMoE-1B-7B", "--layers", 99], "--layers 99: give 1 to 16"),
        (["--shape", "OLMoE-1B-7B", "--traces", "nowhere"], "--traces nowhere: no such file or"),
        (["--domain", "poetry"], "--domain 'poetry': give one of prose, code, mathematics"),
        (["--batch", "0"], "--batch 0: give at least 1"),
        (["--batch", "x"], "--batch 'x': give whole numbers"),
        (["--expert-cache-size", "0"], "at least 1 slot"),
        (["--expert-cache-size", ","], "--expert-cache-size is empty"),
        (["--policy", "best"], "unknown policy 'best'"),
        (["--steps", 9999], "need 10006 positions, the model has"),
        (["--device", "tpu"], "device 'tpu'"),
        (["--expert-cache-size", 99], "but a layer has only 32 experts"),
        (
            ["--compare", "nowhere.json"],
            "nowhere.json cannot be read (No such file or directory): give a file",
        ),
        (["/nowhere"], "/nowhere: no such folder"),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, list) else "",
)
def test_wrong_options_are_one_line(argv: list[object], message: str, cli: Cli) -> None:
    assert_one_line(cli("bench", *SHORT, *argv), message)
