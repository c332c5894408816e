"""One pool for all layers, worked by hand and against caches that scan."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotexperts.errors import ConfigError
from hotexperts.simulate import Rules, Trace, belady, bound, replay
from simulate.models import batched_calls, layered, lru_hits, most_hits, pool_calls, scored_hits
from simulate.test_replay import traces

GLOBAL = Rules(pool="global")


def hits(trace: Trace, policy: str, capacity: int, **rules: object) -> int:
    return replay(trace, policy, capacity, rules=Rules(pool="global", **rules)).total.hits  # type: ignore[arg-type]


def recency(num_experts: int) -> Callable[[int, list[list[int]]], int]:
    """LLRU said otherwise: layers' calls that the expert let pass, then how far its next one is."""

    def weaker_first(expert: int, calls: list[list[int]]) -> int:
        layers = [call[0] // num_experts for call in calls]
        num_layers, mine = 2, expert // num_experts
        last = max(at for at, call in enumerate(calls) if expert in call)
        passed = sum(layer == mine for layer in layers[last + 1 :])
        distance = (mine - layers[-1]) % num_layers or num_layers
        return -(passed * num_layers + distance)

    return weaker_first


def popularity(num_experts: int) -> Callable[[int, list[list[int]]], float]:
    """EWMA's score over the calls of the expert's own layer."""

    def weaker_first(expert: int, calls: list[list[int]]) -> float:
        score = np.float32(0)
        for call in calls:
            if call[0] // num_experts == expert // num_experts:
                score = np.float32(0.95) * score + np.float32(expert in call)
        return float(score)

    return weaker_first


@pytest.mark.parametrize(
    ("text", "capacity", "lru", "llru"),
    [
        ("A/A/A A/A/A", 1, 3, 3),  # three slots in all, and nobody else
        # Layer 0's B needs a slot while layers 1 and 2 wait. LRU evicts the A of layer 1, which
        # comes next and evicts that of layer 2, which evicts the A of layer 0: of the second
        # token only the first A hits. LLRU evicts the A of layer 2, and layer 1 hits.
        ("A/A/A AB/A/A A/A/A", 1, 3, 4),
        # A layer that is left out lets calls pass: LLRU keeps its A no longer than it keeps B.
        ("A/A B/- A/- B/-", 1, 1, 0),
    ],
)
def test_pools_by_hand(text: str, capacity: int, lru: int, llru: int) -> None:
    assert hits(layered(text), "lru", capacity) == lru
    assert hits(layered(text), "llru", capacity) == llru


def test_a_pool_counts_each_layer() -> None:
    outcome = replay(layered("A/A B/A A/A B/A"), "llru", 1, rules=GLOBAL)
    assert [(layer.calls, layer.hits, layer.misses) for layer in outcome.layers] == [
        (4, 0, 4),
        (4, 3, 1),
    ]
    best = bound("belady", layered("A/A B/A A/A B/A"), 1, rules=GLOBAL)
    assert [layer.hits for layer in best.layers] == [1, 3]  # B passes by


def test_a_floor_keeps_a_layer_its_slots() -> None:
    # Layer 1 has one slot; by plain LRU layer 0's calls take it, with a floor of 1 they may not.
    text = "A/A BC/- A/A BC/- A/A"
    assert hits(layered(text), "lru", 1) == 0
    assert hits(layered(text), "lru", 1, pool_floor=1) == 2
    # A layer's own newcomers may replace its experts below the floor's count.
    assert hits(layered("A/A A/B A/B"), "lru", 1, pool_floor=1) == 3


@given(traces(), st.integers(1, 6), st.sampled_from(["id", "listed"]))
def test_the_pooled_lru_is_the_one_that_scans(trace: Trace, capacity: int, ties: str) -> None:
    expected = lru_hits(pool_calls(trace), 2 * capacity, listed=ties == "listed")
    assert hits(trace, "lru", capacity, ties=ties) == expected


@given(traces(prefill=False), st.integers(1, 6), st.data())
def test_a_pool_takes_batches(trace: Trace, capacity: int, data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, len(trace.sequences())))
    layers = [batched_calls(trace, layer, batch) for layer in range(2)]
    calls = [
        ([layer * trace.num_experts + expert for expert in experts], counted)
        for step in zip(*layers, strict=True)
        for layer, (experts, counted) in enumerate(step)
    ]
    found = replay(trace, "lru", capacity, batch, rules=GLOBAL).total.hits
    assert found == lru_hits(calls, 2 * capacity)


@given(traces(), st.integers(1, 6))
@settings(max_examples=50)
def test_pooled_scores_are_the_ones_that_scan(trace: Trace, capacity: int) -> None:
    calls = pool_calls(trace)
    expected = scored_hits(calls, 2 * capacity, recency(trace.num_experts))
    assert hits(trace, "llru", capacity) == expected
    expected = scored_hits(calls, 2 * capacity, popularity(trace.num_experts))
    assert hits(trace, "ewma", capacity) == expected


@given(traces(prefill=False, num_experts=3), st.integers(1, 2))
@settings(max_examples=20)
def test_belady_is_the_best_of_all_choices_in_a_pool(trace: Trace, capacity: int) -> None:
    found = belady(trace, capacity, rules=GLOBAL).total.hits
    assert found == most_hits(pool_calls(trace), 2 * capacity)
    assert found >= belady(trace, capacity).total.hits  # it may share slots out as layers do
    for policy in ("lru", "llru", "ewma"):
        assert hits(trace, policy, capacity) <= found
        assert hits(trace, policy, capacity, pool_floor=1) <= found


def test_what_a_pool_cannot_do_is_refused() -> None:
    trace = layered("A/B C/D")
    with pytest.raises(
        ConfigError, match=r"'adv' has no score that layers can share: .*ewma, llru"
    ):
        replay(trace, "adv", 1, rules=GLOBAL)
    with pytest.raises(ConfigError, match="'llru' is one of a global pool: give pool 'global'"):
        replay(trace, "llru", 1)
    with pytest.raises(
        ConfigError, match=r"pool floor 3: the pool has 2 slots a layer: .*at most 2"
    ):
        hits(trace, "lru", 2, pool_floor=3)
