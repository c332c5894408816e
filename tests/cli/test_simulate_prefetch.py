"""`hotexperts simulate --prefetch` on a trace small enough to be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from cli.conftest import Cli
from hotexperts.simulate import Trace, write_trace
from simulate.models import layered

NBYTES = 110_000_000  # 2 ms on a link of 55 GB/s
ASK = ("--policy", "lru", "--cache-size", 1, "--prefetch", "oracle", "--json", "-")
ADDED = {
    *("predictor", "misses", "issued", "covered", "late", "wasted", "wasted_bytes"),
    *("relative_bytes", "stall_free_hit_ratio", "layers_off"),
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    drawn = layered("A/B A/C D/B", "A/B C/D A/B")
    meta = {**drawn.meta, "expert_nbytes": NBYTES}
    write_trace(Trace(drawn.ids, drawn.phase, drawn.seq, meta), tmp_path / "t.npz")
    return tmp_path / "t.npz"


def test_rows_counted_by_hand(trace: Path, cli: Cli) -> None:
    result = cli("simulate", trace, *ASK, "--prefetch-budget", "2x,110MB", "--compute-ms", 4)
    assert (result.status, result.err) == (0, "")
    plain, found = json.loads(result.out)
    assert set(found) - set(plain) == ADDED
    assert (plain["hits"], found["hits"]) == (2, 2)  # of 12: A, and B after B
    # 4 ms a layer, 2 of them before its router: all is hidden, and the first miss pays for all
    assert [found[name] for name in ("misses", "issued", "covered", "late")] == [10, 9, 9, 0]
    assert (found["wasted"], found["wasted_bytes"], found["relative_bytes"]) == (0, 0, 1.0)
    assert found["stall_free_hit_ratio"] == 11 / 12
    assert (plain["miss_bytes"], found["miss_bytes"]) == (10 * NBYTES, NBYTES)
    assert plain["est_ms_per_token"] == pytest.approx((12 * 4 + 10 * 2) / 6)
    assert found["est_ms_per_token"] == pytest.approx((12 * 4 + 2) / 6)
    # six steps of two layers that compute: longer than Belady's copies
    assert [row["percent_of_bound"] for row in (plain, found)] == pytest.approx(
        [100 * 8 * 6 / ms for ms in (12 * 4 + 10 * 2, 12 * 4 + 2)]
    )
    assert (found["predictor"], found["layers_off"]) == ("oracle", 0)


@pytest.mark.parametrize("jobs", [1, 2])
def test_bounds_and_the_frame_are_not_prefetched(jobs: int, trace: Path, cli: Cli) -> None:
    argv = ("--policy", "adv,belady", "--cache-size", "1,2", "--prefetch", "oracle,previous")
    slack = ("--prefetch-slack", "unlimited", "--jobs", jobs)
    found = json.loads(cli("simulate", trace, *argv, *slack, "--json", "-").out)
    each = [("adv", None), ("adv", "oracle"), ("adv", "previous"), ("belady", None)]
    assert [(r["policy"], r.get("predictor")) for r in found] == each * 2
    untimed = [row for row in found if "predictor" in row]
    for name in ("est_ms_per_token", "est_tokens_per_second", "percent_of_bound"):
        assert {row[name] for row in untimed} == {None}


def test_the_table_shows_both(trace: Path, cli: Cli) -> None:
    argv = ("--policy", "lru", "--cache-size", 1, "--prefetch", "oracle", "--compute-ms", 4)
    # at 1.5 times the bytes two misses must pay for the first guess
    lines = [line.split() for line in cli("simulate", trace, *argv).out.splitlines()]
    rates, times = ["16.7", "%", "16.7", "%", "1.00x"], ["11.33", "88.2", "70.6", "%"]
    assert ["1", "1", "lru", "-", *rates, *times] in lines
    rates, times = ["16.7", "%", "83.3", "%", "1.00x"], ["8.67", "115.4", "92.3", "%"]
    assert ["1", "1", "lru", "oracle", *rates, *times] in lines


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prefetch-ahead", "2"], "--prefetch-ahead without --prefetch: name a predictor"),
        (["--prefetch-tap", "input"], "--prefetch-tap without --prefetch"),
        (["--prefetch-budget", "2x"], "--prefetch-budget without --prefetch"),
        (["--prefetch-rows", "2"], "--prefetch-rows without --prefetch"),
        (["--prefetch-slack", "unlimited"], "--prefetch-slack without --prefetch"),
        (["--moe-share", "0.4"], "--moe-share without --prefetch"),
        (["--prefetch", "psychic"], "unknown predictor 'psychic': choose one of"),
        (["--prefetch", "oracle"], "a layer computes for 0 ms: give --compute-ms, or --prefetch-s"),
        (["--prefetch", "gate", "--compute-ms", "1"], "t.npz: predictor 'gate' needs the router's"),
        (["--prefetch", "oracle", "--prefetch-tap", "side"], "give one of output, input"),
        (["--prefetch", "oracle", "--prefetch-slack", "some"], "give one of compute, unlimited"),
        (["--prefetch", "oracle", "--prefetch-budget", ".5x"], "'.5x': give 1x or more"),
        (["--prefetch", "oracle", "--prefetch-budget", "2x,3x"], "give one Nx, one size, or both"),
        (["--prefetch", "oracle", "--prefetch-budget", "3 hogsheads"], "--prefetch-budget: size"),
        (["--prefetch", "oracle", "--prefetch-rows", "0"], "at most 0 guesses a call: give 1"),
        (["--prefetch", "oracle", "--moe-share", "1.5"], "experts take 1.5 of a layer's compute"),
        (
            ["--prefetch", "oracle", "--compute-ms", "1", "--prefetch-ahead", "3"],
            "t.npz: 3 layers ahead, and the trace has 2",
        ),
        (
            ["--prefetch", "oracle", "--plot", "curves.png"],
            "--plot draws the cache's own hits, which --prefetch leaves as they are",
        ),
    ],
)
def test_wrong_options_are_one_line(argv: list[str], message: str, trace: Path, cli: Cli) -> None:
    result = cli("simulate", trace, *argv)
    assert (result.status, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert message in result.err


def test_what_the_help_lists_without_numpy_is_what_there_is() -> None:
    from hotexperts.cli import foretold
    from hotexperts.predict import PREDICTORS
    from hotexperts.simulate import foretell, prefetch

    assert sorted((*PREDICTORS.names(), *foretell.SIMULATED)) == sorted(foretold.PREDICTORS)
    assert get_args(foretell.Tap) == foretold._TAPS
    assert get_args(prefetch.Slack) == foretold._SLACKS
    assert prefetch.Prefetch().ratio == foretold._RATIO
