"""`hotexperts simulate` with other rules than the engine's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from hotexperts.cli import simulate
from hotexperts.cli.main import main
from hotexperts.simulate import Rules, bound, replay, write_trace
from hotexperts.simulate.bounds import BOUNDS
from hotexperts.simulate.pool import POOLED
from hotexperts.simulate.rules import Pool, Sequences, Ties
from hotexperts.simulate.schedule import Prefill
from simulate.models import layered

TRACE = layered("ab/c BA/CD C/D AB/C", "b/cd C/A BA/DC A/B")
PROFILE = layered("DC/AB D/A")
FIELDS = {
    *("trace", "policy", "capacity", "batch", "demands", "hits", "hit_ratio", "miss_bytes"),
    *("gap_to_belady_closed", "est_ms_per_token", "est_tokens_per_second", "percent_of_bound"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_trace(TRACE, tmp_path / "t.npz")
    write_trace(PROFILE, tmp_path / "profile.npz")
    write_trace(layered("A B"), tmp_path / "other.npz")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def counted(policy: str, capacity: int, rules: Rules) -> int:
    if policy in BOUNDS:
        return bound(policy, TRACE, capacity, rules=rules).total.hits
    return replay(TRACE, policy, capacity, rules=rules).total.hits


@pytest.mark.parametrize(
    ("argv", "rules"),
    [
        (["--ties", "listed"], Rules(ties="listed")),
        (["--pool", "split", "--sequences", "cold"], Rules(pool="split", sequences="cold")),
        (["--pool", "global", "--pool-floor", "1"], Rules(pool="global", pool_floor=1)),
        (["--pool", "global", "--ties", "listed"], Rules(pool="global", ties="listed")),
        (["--preload", "trace"], Rules(preload="trace")),
        (["--preload", "profile.npz", "--jobs", "2"], Rules(preload=PROFILE)),
    ],
)
def test_rows_are_those_of_replay(
    argv: list[str],
    rules: Rules,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    policies = ["lru", "ewma", *(["llru"] if rules.pool == "global" else []), *BOUNDS]
    common = ["--policy", ",".join(policies), "--cache-size", "1,2", "--json", "-"]
    assert main(["simulate", "t.npz", *common, *argv]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert all(set(row) == FIELDS for row in rows)
    found = [(row["policy"], row["capacity"], row["hits"]) for row in rows]
    assert found == [(p, n, counted(p, n, rules)) for n in (1, 2) for p in policies]
    for row in rows:
        lru, best = (
            counted("lru", row["capacity"], rules),
            counted("belady", row["capacity"], rules),
        )
        expected = (row["hits"] - lru) / (best - lru) if best > lru else None
        assert row["gap_to_belady_closed"] == expected


def test_a_global_pool_has_its_own_default_policies(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["simulate", "t.npz", "--pool", "global", "--cache-size", "2", "--json", "-"]
    assert main(argv) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in rows] == ["lru", "ewma", "llru", "belady"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ties", "old"], "--ties 'old': give one of id, listed"),
        (["--pool", "all"], "--pool 'all': give one of layer, global, split"),
        (["--sequences", "hot"], "--sequences 'hot': give one of warm, cold"),
        (["--pool", "global", "--policy", "adv"], "'adv' has no score that layers can share"),
        (["--policy", "llru"], "'llru' is one of a global pool: give pool 'global'"),
        (["--policy", "sieve", "--ties", "listed"], "keeps an order of its own"),
        (["--pool-floor", "2"], "pool floor 2 with pool 'layer'"),
        (["--pool", "global", "--pool-floor", "9"], "t.npz: pool floor 9: the pool has"),
        (["--preload", "no.npz"], "--preload no.npz: no such file: give a trace in .npz"),
        (["--preload", "other.npz"], "t.npz: the preload's trace has 1 layers of 8 experts"),
        (["belady-atomic"], "belady-atomic is no trace: separate values by commas"),
    ],
)
def test_wrong_options_are_one_line(
    argv: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "t.npz", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_prompts_that_are_not_there_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "t.npz", "other.npz", "--preload", "trace"]) == 2
    assert "other.npz: preload 'trace': the trace has no prefill" in capsys.readouterr().err


def test_the_command_names_what_there_is() -> None:
    """Its words are written out, as `--help` must not wait for numpy."""
    assert tuple(BOUNDS) == simulate._BOUNDS
    assert set(simulate._POOLED) == {*POOLED, "belady"}
    for words, kind in (
        (simulate._TIES, Ties),
        (simulate._POOLS, Pool),
        (simulate._SEQUENCES, Sequences),
        (simulate._PREFILLS, Prefill),
    ):
        assert words == get_args(kind)
