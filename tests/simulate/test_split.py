"""A split of slots between layers, by hand and against all splits."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotexperts.simulate import Rules, Trace, belady, replay
from hotexperts.simulate.schedule import layer_calls, schedule
from hotexperts.simulate.split import best_split, lru_hits_by_slots, split_slots
from hotexperts.simulate.streams import streams
from simulate.models import layered, lru_hits, token_calls
from simulate.test_replay import traces

SPLIT = Rules(pool="split")


def test_slots_go_where_they_save_misses() -> None:
    # Layer 0 needs one slot, layer 1 three: four slots, two a layer, serve both.
    trace = layered("A/A A/B A/C A/A A/B A/C A/A A/B A/C A/A A/B A/C")
    assert split_slots(trace, schedule(trace, 1, "warm"), 2) == [1, 3]
    assert replay(trace, "lru", 2).total.hits == 11
    assert replay(trace, "lru", 2, rules=SPLIT).total.hits == 11 + 9
    assert belady(trace, 2, rules=SPLIT).total.hits == 11 + 9
    assert [stream.num_slots for stream in streams(trace, 2, 1, "warm", SPLIT)] == [1, 3]


def test_only_the_first_half_decides() -> None:
    trace = layered("A/A B/A C/A A/A B/A C/A A/A A/B A/C A/A A/B A/C")
    assert split_slots(trace, schedule(trace, 1, "warm"), 2) == [3, 1]


def test_without_a_difference_the_split_is_even() -> None:
    hits = np.zeros((3, 9), np.int64)
    assert best_split(hits, 4) == [4, 4, 4]
    hits[0, 7:] = 1  # worth seven slots
    assert sorted(best_split(hits, 4)[1:]) == [2, 3]
    assert best_split(hits, 4)[0] == 7


@given(traces(), st.sampled_from(["id", "listed"]))
def test_hits_by_slots_are_those_of_lru(trace: Trace, ties: str) -> None:
    steps = schedule(trace, 1, "warm")
    for layer in range(2):
        calls = layer_calls(trace, steps, layer, ties=ties)  # type: ignore[arg-type]
        found = lru_hits_by_slots(calls, trace.num_experts, ties)  # type: ignore[arg-type]
        every = [(experts, True) for experts, _ in token_calls(trace, layer)]
        for slots in range(2, trace.num_experts + 1):  # 2 experts a token
            assert found[slots] == lru_hits(every, slots, listed=ties == "listed")


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_the_split_is_the_best_of_all(seed: int, capacity: int) -> None:
    rng = np.random.default_rng(seed)
    hits = np.concatenate([np.zeros((3, 1), int), rng.integers(0, 9, (3, 4)).cumsum(1)], axis=1)
    found = best_split(hits, capacity)
    splits = [s for s in product(range(1, 5), repeat=3) if sum(s) == 3 * capacity]

    def value(split: tuple[int, ...]) -> tuple[int, int]:
        gained = sum(int(hits[layer, slots]) for layer, slots in enumerate(split))
        return gained, -sum((slots - capacity) ** 2 for slots in split)

    assert tuple(found) in splits
    assert value(tuple(found)) == max(map(value, splits))


@pytest.mark.parametrize("capacity", [1, 4])
def test_all_slots_and_the_fewest_leave_no_choice(capacity: int) -> None:
    trace = layered("A/B C/D A/B C/D", num_experts=4)
    assert replay(trace, "lru", capacity, rules=SPLIT) == replay(trace, "lru", capacity)
