"""Policies that protect or predict: heat, reuse distance, a learned model, worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hotexperts.policy import learned
from policy.replay import Replay


def test_heat_lru_skips_a_slot_with_more_than_four_hits() -> None:
    # A is older than B in both: after five hits it is hot, after four it is not.
    assert Replay("heat-lru", 2).calls("A A A A A A B C") == ". . . . . . . B"
    assert Replay("heat-lru", 2).calls("A A A A A B C") == ". . . . . . A"


def test_heat_lru_is_lru_when_all_are_hot() -> None:
    assert Replay("heat-lru", 2).calls("A A A A A A B B B B B B C").split()[-1] == "A"


def test_heat_lru_counts_from_entry() -> None:
    # A, hot, must leave for B and C. Back again it is cold, and older than C: D takes its place.
    assert Replay("heat-lru", 2).calls("A A A A A A BC C A C D") == ". . . . . . A . B . A"


def test_heat_lru_cools() -> None:
    # Two slots: the 20th use halves all counts, before that call's victim is chosen. Until then
    # B and C take turns in one slot; then A, with 2, is as cold as they are, and older.
    victims = Replay("heat-lru", 2).calls("A " * 6 + "B C " * 7)
    assert victims == ". " * 7 + "B C " * 6 + "A"


def test_reuse_distance_averages_gaps() -> None:
    replay = Replay("reuse-distance", 2)  # of 8 experts: one at a time, all would take 8 events
    replay.calls("A - -")
    assert replay.score("A") == -(8 + 2)
    assert replay.score("B") == -(0 + 3)  # never used: waits since the start
    replay.call("AB")
    assert replay.score("A") == -(8 + 0.1 * (3 - 8))
    assert replay.score("B") == -8 / 2  # two at a time


def test_reuse_distance_evicts_whom_it_expects_last() -> None:
    # At C all have a gap of 8; A waits for 2, B for 1. A is back after 3: its gap is 7.5.
    assert Replay("reuse-distance", 2).calls("A B C A") == ". . A B"


def test_reuse_distance_admits_only_who_is_expected_sooner() -> None:
    # A and B took turns six times: five gaps of 2 take the mean from 8 to 5.54. A, which waits
    # for 2, is expected after 7.54, C after 8. After three turns A was at 6.86 + 2.
    for limit, decision in ((None, "~C"), (1, "~C"), (0, "+C -A")):
        replay = Replay("reuse-distance", 2)
        replay.calls("A B " * 6)
        assert replay.call("C", max_bypassed=limit) == decision
    replay = Replay("reuse-distance", 2)
    replay.calls("A B " * 3)
    assert replay.call("C") == "+C -A"


def test_learned_begins_as_an_average() -> None:
    words = "A A B C D D B"
    assert Replay("learned", 2).calls(words) == Replay("ewma", 2).calls(words) == ". . . B C . A"
    replay = Replay("learned", 2)
    replay.calls("A A")
    assert replay.score("A") == pytest.approx(0.05 * 0.95 + 0.05)


@pytest.mark.parametrize("used", [False, True])
def test_learned_takes_one_step_for_whose_turn_it_is(used: bool) -> None:
    # A, expert 0, has its turn at 0 and at 8, alone of eight experts.
    replay = Replay("learned", 2)
    replay.calls("A - - - - - - " + ("A" if used else "-"))
    before = [0, 0, 0, 1, 0, 0, 0, 0]
    assert replay.policy.weight[:, 0].tolist() == before
    replay.call("-")
    at_first_turn = [0.5, 0.2, 0.1, 0.05, 0.02, 0, math.log(2) / math.log(512), 1]
    chance = 1 / (1 + math.exp(-0.05))
    after = np.array(before) - 0.5 * (chance - used) * np.array(at_first_turn)
    assert replay.policy.weight[:, 0] == pytest.approx(after, abs=1e-6)


def test_learned_finds_out_that_the_oldest_use_comes_next() -> None:
    # Twelve experts take turns in six slots: LRU never hits. Who was just used is not used
    # within the horizon: the weight of age rises above 0, and the youngest leave.
    replay = Replay("learned", 6, num_experts=12)
    words = "A B C D E F G H I J K L " * 40
    hits = [not found.admitted for found in map(replay.decide, words.split())]
    assert replay.policy.weight[learned.AGE, 0] > 0
    assert sum(hits[-120:]) > 20


def test_learned_stays_finite() -> None:
    replay = Replay("learned", 2)
    for _ in range(3000):
        replay.decide("ABC")
    assert np.isfinite(replay.policy.weight).all()
    assert np.isfinite(replay.policy.score).all()
