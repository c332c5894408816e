"""Ties by the router's order: what an earlier place in a token's list is worth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotexperts.errors import ConfigError
from hotexperts.policy import POLICIES, Policy
from hotexperts.simulate import Rules, Trace, belady, replay
from hotexperts.simulate.schedule import LayerCall, layer_calls, schedule
from simulate.models import lettered, lru_hits, token_calls
from simulate.test_replay import traces

LISTED = Rules(ties="listed")


@pytest.mark.parametrize(
    ("text", "capacity", "by_id", "listed"),
    [
        ("AB C B", 2, 1, 0),  # by id A leaves for C; B was listed later
        ("BA C B", 2, 1, 1),
        ("BA B", 1, 0, 1),  # one slot: by id A enters, B was listed first
    ],
)
def test_lru_by_hand(text: str, capacity: int, by_id: int, listed: int) -> None:
    trace = lettered(text)
    assert replay(trace, "lru", capacity).total.hits == by_id
    assert replay(trace, "lru", capacity, rules=LISTED).total.hits == listed


@given(traces(), st.integers(1, 6))
def test_listed_is_the_lru_that_scans(trace: Trace, capacity: int) -> None:
    found = replay(trace, "lru", capacity, rules=LISTED)
    calls = [token_calls(trace, layer) for layer in range(2)]
    assert [layer.hits for layer in found.layers] == [
        lru_hits(layer, capacity, listed=True) for layer in calls
    ]


@given(traces(prefill=False), st.integers(1, 6))
def test_belady_does_not_depend_on_ties(trace: Trace, capacity: int) -> None:
    assert belady(trace, capacity, rules=LISTED) == belady(trace, capacity)


def test_lanes_list_one_after_the_other() -> None:
    trace = lettered("BA", "CA")
    calls = list(layer_calls(trace, schedule(trace, 2, "warm"), 0, ties="listed"))
    assert calls == [LayerCall([1, 0, 2], [1, 2, 1], counted=True, evict=True)]


@pytest.mark.parametrize("name", ["sieve", "arc", "w-tinylfu", "simulate.test_ties:Own"])
def test_a_policy_with_an_order_of_its_own_has_no_ties(name: str) -> None:
    with pytest.raises(ConfigError, match=f"policy '{name}' keeps an order of its own.*ties 'id'"):
        replay(lettered("A"), name, 1, rules=LISTED)


@pytest.mark.parametrize("name", POLICIES.names())
def test_every_policy_breaks_ties_as_listed_or_is_refused(name: str) -> None:
    try:
        found = replay(lettered("BA DC BA EC AB"), name, 3, rules=LISTED).total
    except ConfigError as error:
        assert "keeps an order of its own" in str(error)  # noqa: PT017  # both are right
    else:
        assert found.demands == 10


def test_a_score_breaks_ties_as_listed() -> None:
    # EWMA: A and B have the same score when C comes; by id A leaves, as listed B does.
    for policy in ("ewma", "lfu", "lfru"):
        assert replay(lettered("AB C A"), policy, 2).total.hits == 0
        assert replay(lettered("AB C A"), policy, 2, rules=LISTED).total.hits == 1


class Own(POLICIES.load("lru")):  # type: ignore[misc]
    """Decides without `Policy.decide`, so that nobody can tell what breaks its ties."""

    decide = lambda self, *args, **rest: Policy.decide(self, *args, **rest)  # noqa: E731


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ties": "random"}, "ties 'random': give one of id, listed"),
        ({"pool": "shared"}, "pool 'shared': give one of layer, global, split"),
        ({"sequences": "hot"}, "sequences 'hot': give one of warm, cold"),
        ({"preload": "profile.npz"}, "preload 'profile.npz': give a Trace, or 'trace'"),
        ({"pool_floor": -1}, "pool floor -1: give 0 slots or more"),
        ({"pool_floor": 2}, "pool floor 2 with pool 'layer': .*give pool 'global', or no floor"),
    ],
)
def test_rules_that_mean_nothing_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rules(**values)  # type: ignore[arg-type]
