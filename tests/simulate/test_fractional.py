"""Half of an expert resident, by hand and under Belady's bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotexperts.cli.main import main
from hotexperts.errors import ConfigError, UnknownNameError
from hotexperts.policy import POLICIES
from hotexperts.simulate import Rules, Trace, belady, write_trace
from hotexperts.simulate.fractional import FractionalStats, _Halves, replay_fractional
from hotexperts.simulate.schedule import layer_calls, schedule
from simulate.models import layered, lettered
from simulate.test_replay import traces


@pytest.mark.parametrize(
    ("text", "capacity", "whole", "half"),
    [
        ("A A A", 1, 2, 0),  # alone it has all the room
        ("A A B A", 1, 1, 1),  # B and A share one expert's bytes
        ("A B A B", 1, 0, 2),  # where LRU hits nothing
        ("A B C A B C", 2, 0, 3),  # the last whole, the two before it by half
        ("AB C A C", 2, 0, 2),  # C and, of equals, the lower id has lost a half
        ("A A B C A", 2, 2, 0),  # scores 1.67, .95 and 1: hot A stays whole
        ("A B C", 3, 0, 0),  # first touches
        ("a A B C A", 2, 2, 0),  # prefill warms and is not counted
    ],
)
def test_by_hand(text: str, capacity: int, whole: int, half: int) -> None:
    found = replay_fractional(lettered(text), capacity).total
    assert (found.hits, found.part_hits) == (whole, half)


def test_a_half_hit_is_half_a_hit_in_bytes() -> None:
    stats = FractionalStats(hits=3, misses=5, part_hits=2)
    assert stats.demands == 8
    assert stats.hit_rate == 4 / 8
    assert stats.missed_nbytes(10) == 3 * 10 + 2 * 5
    assert stats.missed_nbytes(9) == 3 * 9 + 2 * 5  # the first half has 4


def test_a_half_becomes_whole_only_when_it_is_demanded() -> None:
    cache = _Halves(num_experts=8, num_slots=2)
    held = []
    for call in layer_calls(lettered("A B C A"), schedule(lettered("A B C A"), 1, "warm"), 0):
        cache.play(call)
        held.append(cache.held)
    assert held[:2] == [{0: 2}, {0: 2, 1: 2}]
    assert held[2] == {0: 1, 1: 1, 2: 2}
    assert held[3] == {0: 2, 1: 1, 2: 1}


def test_a_prefill_at_once_takes_free_room_only() -> None:
    # Prompt "abc" of both sequences: the second finds the room taken and moves nothing.
    trace = lettered("a A A", "bcd A")
    assert replay_fractional(trace, 1, prefill="seed").total.hits == 3


@given(traces(), st.integers(1, 6), st.sampled_from(["layer", "split"]))
def test_no_more_bytes_than_there_is_room_for(trace: Trace, capacity: int, pool: str) -> None:
    steps = schedule(trace, 1, "warm")
    cache = _Halves(trace.num_experts, capacity)
    for call in layer_calls(trace, steps, 0):
        before = dict(cache.held)
        cache.play(call)
        assert sum(cache.held.values()) <= 2 * capacity
        assert set(cache.held.values()) <= {1, 2}
        for expert, halves in cache.held.items():
            assert expert in call.demand or halves <= before[expert]
        for expert in call.demand:  # what its call uses stays there
            assert cache.held.get(expert, 0) >= before.get(expert, 0)
    rules = Rules(pool=pool)  # type: ignore[arg-type]
    found = replay_fractional(trace, capacity, prefill="ignore", rules=rules).total
    best = belady(trace, capacity, prefill="ignore", rules=rules).total
    assert found.demands == best.demands
    assert found.resident <= best.hits  # whole experts are as good as any parts, foreseen


def test_layers_and_cold_starts_are_apart() -> None:
    trace = layered("A/A A/B", "A/B A/A")
    assert replay_fractional(trace, 2).total.hits == 3 + 2
    assert replay_fractional(trace, 2, rules=Rules(sequences="cold")).total.hits == 2


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Rules(pool="global"), "ranks one layer: give pool 'layer' or 'split'"),
        (Rules(ties="listed"), "breaks ties by id alone: give ties 'id'"),
    ],
)
def test_rules_that_halves_cannot_follow(rules: Rules, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay_fractional(lettered("A B"), 1, rules=rules)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fractional", "keeps half an expert, and a slot holds a whole one"),
        ("belady", "is a bound, which knows the future"),
        ("llru", "ranks experts of all layers, and each layer has its own slots"),
    ],
)
def test_the_engine_says_why_it_has_no_such_policy(name: str, reason: str) -> None:
    with pytest.raises(UnknownNameError, match=f"policy '{name}' {reason}: it is for .*choose one"):
        POLICIES.load(name)
    with pytest.raises(ConfigError, match="already registered"):
        POLICIES.register(name, "hotexperts.policy.lru:LRU")


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(lettered("A B A B"), tmp_path / "t.npz")
    monkeypatch.chdir(tmp_path)
    common = ["--cache-size", "1", "--expert-mb", "4", "--json", "-"]
    argv = ["simulate", "t.npz", "--policy", "fractional,lru", *common]
    assert main(argv) == 0
    half, lru = json.loads(capsys.readouterr().out)
    assert (half["hits"], half["part_hits"], half["hit_ratio"]) == (0, 2, 0.25)
    assert half["miss_bytes"] == 12_000_000
    assert lru["miss_bytes"] == 16_000_000
    assert half["gap_to_belady_closed"] == 1.0  # Belady hits once
    assert main([*argv, "--plot", "t.html", "--jobs", "2"]) == 0
    assert "fractional" in (tmp_path / "t.html").read_text()
    capsys.readouterr()
    assert main([*argv, "--prefetch", "popularity", "--prefetch-slack", "unlimited"]) == 2
    assert "policy 'fractional' with prefetch" in capsys.readouterr().err
    assert main(["report", "t.npz", "--policy", "fractional", "-o", "page.html"]) == 0
    assert "fractional" in (tmp_path / "page.html").read_text()
