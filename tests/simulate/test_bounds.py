"""The bounds, worked by hand and against every choice there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotexperts.errors import UnknownNameError
from hotexperts.policy import POLICIES
from hotexperts.simulate import Trace, bound, replay
from hotexperts.simulate.bounds import BOUNDS
from simulate.models import lettered, most_atomic_hits, soonest_hits, token_calls

NAMES = ("infinite", "belady", "belady-atomic", "belady-forced")  # the strongest first


@st.composite
def traces(draw: st.DrawFn, *, num_experts: int = 5) -> Trace:
    """One layer, one sequence, all decode; 1 to 3 distinct experts a token."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_tokens = draw(st.integers(1, 10))
    ids = rng.random((num_tokens, 1, num_experts)).argsort(axis=2)[..., :3]
    ids[np.arange(3) >= rng.integers(1, 4, size=(num_tokens, 1, 1))] = -1
    phase, seq = np.ones(num_tokens, int), np.zeros(num_tokens, int)
    return Trace(ids, phase, seq, {"n_experts": num_experts})


@pytest.mark.parametrize(
    ("text", "capacity", "hits"),
    [
        ("A B A", 1, (1, 1, 1, 0)),  # forced, B drives A out
        ("A AB B", 1, (2, 2, 1, 1)),  # A may not leave in the call that needs it, so B passes by
        ("A B C A B", 2, (2, 2, 2, 1)),  # forced, C takes A's or B's place
        ("ABC ABC", 2, (3, 2, 2, 2)),
        ("AB BDA B CD CBD", 1, (7, 3, 3, 3)),  # of A and B, both needed next, B serves longer
    ],
)
def test_bounds_by_hand(text: str, capacity: int, hits: tuple[int, ...]) -> None:
    found = tuple(bound(name, lettered(text), capacity).total.hits for name in NAMES)
    assert found == hits


def test_the_second_use_decides_where_the_first_is_the_same() -> None:
    assert soonest_hits(token_calls(lettered("AB BDA B CD CBD"), 0), 1) == 2


def test_only_first_touches_miss_with_a_slot_for_every_expert() -> None:
    assert bound("infinite", lettered("AB BC A D", "D A"), 1).total.misses == 4
    assert bound("infinite", lettered("a A B"), 1).total.misses == 1  # a prefill touches, too


def test_a_seeded_prefill_evicts_nobody_where_the_engine_rules() -> None:
    trace = lettered("A", "bc B A B")
    hits = [bound(name, trace, 1, prefill="seed").total.hits for name in NAMES]
    assert hits == [3, 2, 1, 0]  # A holds the only slot when B comes; forced, it loses it too late
    trace = lettered("A B", "cd C D C D A B")
    hits = [bound(name, trace, 2, prefill="seed").total.hits for name in NAMES]
    assert hits == [6, 4, 2, 2]  # A and B hold both slots when C and D come


@given(traces(), st.integers(1, 5))
def test_atomic_and_forced_are_the_best_of_all_choices(trace: Trace, capacity: int) -> None:
    calls = token_calls(trace, 0)
    assert bound("belady-atomic", trace, capacity).total.hits == most_atomic_hits(calls, capacity)
    forced = bound("belady-forced", trace, capacity).total.hits
    assert forced == most_atomic_hits(calls, capacity, forced=True)


@given(traces(), st.integers(1, 5))
def test_the_bounds_follow_one_another(trace: Trace, capacity: int) -> None:
    hits = [bound(name, trace, capacity).total.hits for name in NAMES]
    assert hits == sorted(hits, reverse=True)
    assert soonest_hits(token_calls(trace, 0), capacity) <= hits[2]
    for policy in POLICIES.names():
        assert replay(trace, policy, capacity).total.hits <= hits[2], policy


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from(["warm", "seed", "ignore"]))
@settings(max_examples=30)
def test_nothing_beats_a_slot_for_every_expert(seed: int, capacity: int, prefill: str) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.random((12, 2, 6)).argsort(axis=2)[..., :2]
    phase = np.arange(12) % 6 >= 3
    trace = Trace(ids, phase.astype(int), np.repeat([0, 1], 6), {"n_experts": 6})
    most = bound("infinite", trace, capacity, 2, prefill).total.hits  # type: ignore[arg-type]
    for name in BOUNDS:
        assert bound(name, trace, capacity, 2, prefill).total.hits <= most  # type: ignore[arg-type]
    for policy in ("lru", "adv", "sieve"):
        assert replay(trace, policy, capacity, 2, prefill).total.hits <= most  # type: ignore[arg-type]


def test_an_unknown_bound_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown bound 'opt': choose one of belady, "):
        bound("opt", lettered("A"), 1)
