"""`hotexperts simulate` on traces small enough to be counted by hand."""

from __future__ import annotations

import builtins
import importlib.util
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Cli, Result
from hotexperts.errors import ConfigError, HotExpertsError
from hotexperts.simulate import Trace, belady, replay, write_trace
from hotexperts.simulate.cost import Cost, expert_nbytes
from hotexperts.simulate.sweep import Sweep, count_steps, run_sweep
from simulate.models import layered, lettered

NBYTES = 110_000_000  # 2 ms on a link of 55 GB/s
TEXT = "A B A C B"
TWICE = lettered(TEXT, TEXT)  # 8 experts in its one layer
FIELDS = {
    *("trace", "policy", "capacity", "batch", "demands", "hits", "hit_ratio", "miss_bytes"),
    *("gap_to_belady_closed", "est_ms_per_token", "est_tokens_per_second", "percent_of_bound"),
}

TIMES = ("miss_bytes", "est_ms_per_token", "est_tokens_per_second", "percent_of_bound")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return saved(TWICE, tmp_path / "twice.npz", expert_nbytes=NBYTES)


def saved(trace: Trace, path: Path, **meta: Any) -> Path:
    write_trace(Trace(trace.ids, trace.phase, trace.seq, {**trace.meta, **meta}), path)
    return path


def rows(result: Result) -> list[dict[str, Any]]:
    assert (result.status, result.err, result.out.count("\n")) == (0, "", 1)
    return json.loads(result.out)


def assert_one_line(result: Result, message: str) -> None:
    assert (result.status, result.out) == (2, ""), result
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert message in result.err


def test_rows_counted_by_hand(trace: Path, cli: Cli) -> None:
    argv = ("--policy", "lru,belady", "--cache-size", 2, "--batch", "1,2", "--compute-ms", 0.5)
    found = rows(cli("simulate", trace, *argv, "--json", "-"))
    assert all(set(row) == FIELDS for row in found)
    assert [
        tuple(row[name] for name in ("policy", "batch", "demands", "hits")) for row in found
    ] == [
        ("lru", 1, 10, 3),
        ("belady", 1, 10, 6),
        ("lru", 2, 5, 1),  # both lanes ask for the same
        ("belady", 2, 5, 2),
    ]
    assert [row["hit_ratio"] for row in found] == [0.3, 0.6, 0.2, 0.4]
    assert [row["gap_to_belady_closed"] for row in found] == [0.0, 1.0, 0.0, 1.0]
    assert [row["miss_bytes"] // NBYTES for row in found] == [7, 4, 4, 3]
    expected = [7 * 2 / 10 + 0.5, 4 * 2 / 10 + 0.5, (4 * 2 / 5 + 0.5) / 2, (3 * 2 / 5 + 0.5) / 2]
    assert [row["est_ms_per_token"] for row in found] == pytest.approx(expected)
    assert [row["est_tokens_per_second"] for row in found] == pytest.approx(
        [1000 / ms for ms in expected]
    )
    bounds = [4 * 2 / 10] * 2 + [3 * 2 / 5 / 2] * 2  # Belady's copies, longer than the compute
    assert [row["percent_of_bound"] for row in found] == pytest.approx(
        [100 * bound / ms for bound, ms in zip(bounds, expected, strict=True)]
    )
    assert {row["trace"] for row in found} == {str(trace)}


def test_where_the_compute_is_longer_it_is_the_bound(trace: Path, cli: Cli) -> None:
    argv = ("--policy", "lru,infinite", "--cache-size", 2, "--compute-ms", 2)
    found = rows(cli("simulate", trace, *argv, "--json", "-"))
    assert [row["miss_bytes"] // NBYTES for row in found] == [7, 3]
    expected = [100 * 2 / (7 * 2 / 10 + 2), 100 * 2 / (3 * 2 / 10 + 2)]
    assert [row["percent_of_bound"] for row in found] == pytest.approx(expected)


def test_a_step_that_takes_no_time_has_no_speed(tmp_path: Path, cli: Cli) -> None:
    path = saved(lettered("a A A"), tmp_path / "t.npz", expert_nbytes=NBYTES)
    row, *_ = rows(cli("simulate", path, "--policy", "lru", "--cache-size", 1, "--json", "-"))
    assert (row["hits"], row["est_ms_per_token"]) == (2, 0.0)
    assert (row["est_tokens_per_second"], row["percent_of_bound"]) == (None, None)


@pytest.mark.parametrize("prefill", ["warm", "seed", "ignore"])
@pytest.mark.parametrize("jobs", [1, 2])
def test_rows_are_those_of_replay(prefill: Any, jobs: int, tmp_path: Path, cli: Cli) -> None:
    trace = lettered("ab bc A B AC D", "cd C A BD A C", "b B A")
    path = saved(trace, tmp_path / "mixed.jsonl")
    argv = ("--cache-size", "2,3", "--cache-size", 4, "--batch", 2, "--prefill", prefill)
    names = ("--policy", "sieve,adv", "--policy", "belady")
    found = rows(cli("simulate", path, *argv, *names, "--json", "-", "--jobs", jobs))
    assert [(r["capacity"], r["policy"]) for r in found] == [
        (n, policy) for n in (2, 3, 4) for policy in ("sieve", "adv", "belady")
    ]
    for row in found:
        n = row["capacity"]
        lru, best = replay(trace, "lru", n, 2, prefill).total, belady(trace, n, 2, prefill).total
        mine = (
            best if row["policy"] == "belady" else replay(trace, row["policy"], n, 2, prefill).total
        )
        assert (row["demands"], row["hits"]) == (mine.demands, mine.hits)
        gap = best.hits - lru.hits
        assert row["gap_to_belady_closed"] == ((mine.hits - lru.hits) / gap if gap > 0 else None)
        assert {row[name] for name in TIMES} == {None}


def test_the_defaults_are_a_table_of_three_sizes(trace: Path, cli: Cli) -> None:
    result = cli("simulate", trace)
    assert (result.status, result.err) == (0, "")
    assert str(trace)[:60] in result.out.replace("\n", "")
    lines = [line.split() for line in result.out.splitlines()]
    found = [line[:3] for line in lines if line[:1] == ["1"]]
    assert found == [["1", n, p] for n in "124" for p in ("lru", "adv", "belady")]
    times = ["734", "MiB", "1.40", "714.3", "57.1", "%"]
    assert ["1", "2", "lru", "30.0", "%", "0.0", "%", *times] in lines
    assert "Bytes and times need" not in result.out


def test_an_expert_of_unknown_size_has_no_bytes(tmp_path: Path, cli: Cli) -> None:
    path = saved(TWICE, tmp_path / "t.npz")
    assert "Bytes and times need --expert-mb" in cli("simulate", path).out
    found = rows(cli("simulate", path, "--expert-mb", 1.5, "--policy", "lru", "--json", "-"))
    assert [row["miss_bytes"] for row in found][:2] == [15_000_000, 10_500_000]


def test_the_gap_is_null_where_there_is_none(trace: Path, cli: Cli) -> None:
    found = rows(cli("simulate", trace, "--cache-size", 8, "--json", "-"))
    assert [row["hits"] for row in found] == [7, 7, 7]
    assert [row["gap_to_belady_closed"] for row in found] == [None, None, None]


def test_no_full_batch_of_decode_has_no_rate(tmp_path: Path, cli: Cli) -> None:
    path = saved(lettered("a b", "A B"), tmp_path / "t.npz", expert_nbytes=NBYTES)
    row, *_ = rows(cli("simulate", path, "--cache-size", 2, "--batch", 2, "--json", "-"))
    assert (row["demands"], row["hit_ratio"]) == (0, None)
    assert {row[name] for name in TIMES if name != "miss_bytes"} == {None}
    assert "-" in cli("simulate", path, "--cache-size", 2, "--batch", 2).out


def test_json_into_a_file_is_what_is_printed(trace: Path, tmp_path: Path, cli: Cli) -> None:
    result = cli("simulate", trace, "--json", tmp_path / "rows.json")
    assert (result.status, result.err) == (0, "")
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written == rows(cli("simulate", trace, "--json", "-"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policy", "mru"], "unknown policy 'mru': choose one of"),
        (["--policy", ","], "--policy is empty: list lru,adv,belady, or leave it out"),
        (["adv"], "adv is no trace: separate values by commas"),
        (["--policy", "lru", "mru"], "mru: no such file: give a trace"),
        (["--cache-size", "1B"], "twice.npz: 1 bytes are less than one expert of "),
        (["--cache-size", "6 parsecs"], "size '6 parsecs' has the unknown unit 'parsecs'"),
        (
            ["--cache-size", "0"],
            "twice.npz: capacity 0: a layer of the trace has 8 experts: give 1",
        ),
        (["--cache-size", "8,9"], "capacity 9: a layer of the trace has 8 experts: give 1 to 8"),
        (["--cache-size", "many"], "--cache-size 'many': give whole numbers, such as 8,16"),
        (["--cache-size", ""], "--cache-size is empty: list 16,32, or leave it out"),
        (["--batch", "3"], "twice.npz: batch 3: the trace has 2 sequences: give 1 to 2"),
        (["--batch", "0"], "batch 0: the trace has 2 sequences"),
        (["--prefill", "hot"], "--prefill 'hot': give one of warm, seed, ignore"),
        (["--link-gb-s", "0"], "a link of 0 GB/s: give"),
        (["--link-gb-s", "nan"], "a link of nan GB/s: give"),
        (["--compute-ms", "-1"], "-1 ms of compute a layer: give 0"),
        (["--expert-mb", "inf"], "an expert of inf MB: give its 10^6 bytes"),
        (["--expert-mb", "1e308"], "an expert of 1e+308 MB: give its 10^6 bytes"),
        (["--json", "nowhere/rows.json"], "--json nowhere/rows.json: no such folder"),
        (["--json", "."], "--json '.' is a folder: name a file in it"),
        (["--plot", "curves.txt"], "end the name in .png, .svg, .pdf, .html"),
        (["--plot", "nowhere/curves.png"], "--plot nowhere/curves.png: no such folder"),
    ],
)
def test_wrong_options_are_one_line(argv: list[str], message: str, trace: Path, cli: Cli) -> None:
    assert_one_line(cli("simulate", trace, *argv), message)


def test_lists_may_be_divided_by_spaces(trace: Path, cli: Cli) -> None:
    lists = ["--policy", "lru", "adv", "belady", "--cache-size", "2", "4", "--batch", "1", "2"]
    commas = ["--policy", "lru,adv,belady", "--cache-size", "2,4", "--batch", "1,2"]
    expected = rows(cli("simulate", trace, *commas, "--json", "-"))
    assert len(expected) == 12
    assert rows(cli("simulate", trace, *lists, "--json", "-")) == expected
    assert rows(cli("simulate", *lists, trace, "--json", "-")) == expected  # a file is a trace


def test_a_cache_in_bytes(trace: Path, tmp_path: Path, cli: Cli) -> None:
    layers = saved(layered("A/A B/A C/A"), tmp_path / "two.npz")
    argv = ["--policy", "lru", "--json", "-", "--expert-mb", "2"]
    sizes = ["--cache-size", "12MB,1GiB,3,15.9MB"]
    assert [row["capacity"] for row in rows(cli("simulate", layers, *sizes, *argv))] == [3, 8]
    assert_one_line(
        cli("simulate", layers, "--cache-size", "12MB"),
        "two.npz: a cache in bytes: give --expert-mb, an expert's size, or slots",
    )


def test_wrong_traces_are_one_line(trace: Path, tmp_path: Path, cli: Cli) -> None:
    bad = tmp_path / "bad.jsonl"
    assert_one_line(cli("simulate", bad), "bad.jsonl: no such file: give a trace in .npz")
    bad.write_text('{"token": 0, "layer": 0}\n')
    assert_one_line(cli("simulate", trace, bad), "bad.jsonl: line 1, field 'experts': missing")
    saved(TWICE, bad, expert_nbytes="big")
    assert_one_line(cli("simulate", bad), "bad.jsonl: meta, field 'expert_nbytes': 'big': give")
    saved(lettered("a b"), bad)
    assert_one_line(cli("simulate", bad), "bad.jsonl: the trace has no decode tokens")
    assert cli("simulate").status == 2
    assert cli("simulate", trace, "--jobs", 0).status == 2


def test_without_matplotlib_a_plot_is_refused_first(
    trace: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    original = builtins.__import__

    def find(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", find)
    result = cli("simulate", trace, "--plot", tmp_path / "curves.png")
    assert_one_line(result, "matplotlib is not installed: pip install -e '.[plot]'")


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")
def test_a_plot_is_a_picture(trace: Path, tmp_path: Path, cli: Cli) -> None:
    result = cli("simulate", trace, "--batch", "1,2", "--plot", tmp_path / "curves.png")
    assert (result.status, result.err) == (0, "")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_plot_as_a_page(trace: Path, tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "curves.html"
    assert cli("simulate", trace, "--batch", "1,2", "--plot", path).status == 0
    page = path.read_text()
    assert page.count("<svg") == page.count("</svg>") == 4, "two batches, two heat maps"
    assert page.count("<polyline") == 2 * 3, "lru, adv and belady in each batch"
    assert "matplotlib" not in page


def test_help_needs_no_numpy() -> None:
    code = "import sys; from hotexperts.cli.main import main; main(['simulate', '--help'])"
    code += "; assert 'numpy' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_killed_process_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os\nfrom hotexperts.policy.lru import LRU\n"
        "class Deadly(LRU):\n    def decide(self, *args, **kwargs):\n        os._exit(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sweep = Sweep({"t": TWICE}, ["deadly:Deadly"], [2])
    count_steps(sweep)
    with pytest.raises(HotExpertsError, match=r"one of 2 processes was killed.*give fewer jobs"):
        run_sweep(sweep, jobs=2)


def test_ctrl_c_does_not_wait_for_replays_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sleepy.py").write_text(
        "import time\nfrom hotexperts.policy.lru import LRU\n"
        "class Sleepy(LRU):\n    def decide(self, *args, **kwargs):\n        time.sleep(60)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sweep = Sweep({"t": TWICE}, ["sleepy:Sleepy"], [2])

    def stop() -> None:  # after the first replay, of LRU
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, jobs=3, on_done=stop)
    assert time.monotonic() - start < 30
    assert multiprocessing.active_children() == []


def test_the_cost_of_a_step() -> None:
    assert Cost(10.0, 0.25).ms_per_token(4 * 10**9, num_layers=8, num_steps=4, batch=2) == 51.0
    assert expert_nbytes({"expert_nbytes": 7}) == 7
    assert expert_nbytes({"expert_nbytes": 7}, 9.4) == 9_400_000
    with pytest.raises(ConfigError, match="give its 10\\^6 bytes"):
        expert_nbytes({}, 1e-9)


def test_what_the_help_lists_without_numpy_is_what_there_is() -> None:
    """The command line starts without the modules that own these names."""
    from typing import get_args

    from hotexperts.cli import simulate, trace
    from hotexperts.simulate import generate, rules

    assert simulate._PROMPTS == rules.PROMPTS
    assert get_args(rules.Ties) == simulate._TIES
    assert get_args(rules.Pool) == simulate._POOLS
    assert get_args(rules.Sequences) == simulate._SEQUENCES
    assert set(trace._KINDS) == set(generate.GENERATORS)
