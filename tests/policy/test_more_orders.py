"""The published policies' own orders, worked by hand. Experts are letters (`Replay`)."""

from __future__ import annotations

from typing import Any

import pytest

from hotexperts.errors import ConfigError
from hotexperts.policy import POLICIES
from policy.replay import Replay


def test_lru_2_evicts_the_oldest_second_last_use() -> None:
    # Second-last uses: A at 1, B at 2. LRU would evict B, last used at 3.
    assert Replay("lru-2", 2).calls("A A B B A C") == ". . . . . A"


def test_lru_2_evicts_what_was_used_once_and_remembers_who_left() -> None:
    # B was used once; back for its second use, at 4 after 2, it outlasts A with 0.
    assert Replay("lru-2", 2).calls("A A B C B D") == ". . . B C A"


def test_sieve_spares_what_was_used_and_goes_on_from_there() -> None:
    # D: the hand clears A's bit and takes B. Then C, D and E in turn, although A is older.
    assert Replay("sieve", 3).calls("A B C A D E F G") == ". . . . B C D E"


def test_sieve_clears_the_bit_of_a_demanded_expert_that_it_passes() -> None:
    # AC: A hits, the hand passes it and takes B, the youngest. D: from the oldest again, A.
    assert Replay("sieve", 2).calls("A B AC D") == ". . B A"


def test_s3_fifo_moves_the_used_to_main_and_lets_ghosts_enter_there() -> None:
    # One slot is the small queue's. E: A, used twice more, goes to main, B leaves. B comes back
    # as a ghost, into main: F and G take D and E, which are younger than both.
    replay = Replay("s3-fifo", 4)
    assert replay.calls("A A A B C D E B F G") == ". . . . . . B C D E"
    assert sorted(replay.policy.main) == [0, 1]


def test_s3_fifo_wants_more_than_one_hit() -> None:
    assert Replay("s3-fifo", 2).calls("A A B C") == ". . . A"
    assert Replay("s3-fifo", 2).calls("A A A B C") == ". . . . B"


def test_arc_moves_its_target_with_the_ghosts() -> None:
    # A is in T2, B in T1: B leaves. As a ghost of B1 it lifts the target to 1, so that C in T1
    # may stay and A leaves; as a ghost of B2 A takes the target back to 0, and C leaves.
    replay = Replay("arc", 2)
    assert replay.calls("A A B C") == ". . . B"
    assert (replay.calls("B"), replay.policy.target) == ("A", 1.0)
    assert (replay.calls("A"), replay.policy.target) == ("C", 0.0)


def test_w_tinylfu_lets_the_more_frequent_into_main() -> None:
    # One slot is the window's, one main's, where A is with two uses. B leaves the window with
    # one use and loses; C leaves it with three and wins.
    assert Replay("w-tinylfu", 2).calls("A A B C C C D") == ". . . B . . A"


def test_w_tinylfu_lets_every_miss_enter() -> None:
    # C displaces B, which loses against A with two uses. D displaces C, which is demanded and
    # no victim: it wins, although it was used once, and A leaves.
    replay = Replay("w-tinylfu", 2)
    replay.calls("A A B")
    assert replay.call("CD", max_bypassed=1) == "+CD -BA"
    assert (list(replay.policy.window), list(replay.policy.probation)) == ([3], [2])


def test_w_tinylfu_takes_no_demanded_resident_for_a_loser() -> None:
    # B is in the window and hits; C displaces it, and A, although more frequent, must leave.
    assert Replay("w-tinylfu", 2).calls("A A A B BC") == ". . . . A"


def test_w_tinylfu_looks_for_a_victim_in_the_window_when_main_is_needed() -> None:
    # A is main's only expert and demanded: B, in the window, has no chance at the gate.
    assert Replay("w-tinylfu", 2).calls("A B B AC") == ". . . B"


def test_lirs_keeps_what_came_back_soon() -> None:
    # A and B are LIR, one slot is for HIR: C, then D. C comes back while it is in the stack and
    # becomes LIR; A, at the bottom, goes to the queue and leaves next.
    assert Replay("lirs", 3).calls("A B C D C E") == ". . . C D A"


def test_lirs_has_a_tenth_of_the_slots_for_who_is_not_used_again_soon() -> None:
    policies: Any = [Replay("lirs", slots, num_experts=32).policy for slots in (3, 19, 20, 32)]
    assert [policy.max_lir for policy in policies] == [2, 18, 18, 29]


def test_lirs_takes_the_bottom_of_the_stack_when_the_queue_is_empty() -> None:
    # C is in the queue; of A and B, both LIR, A is nearer the bottom.
    assert Replay("lirs", 3).calls("A B C DE") == ". . . CA"


def test_least_stale_is_lru_within_a_layer() -> None:
    words = "DB A C E AB F DB AC"
    assert Replay("least-stale", 3).calls(words) == Replay("lru", 3).calls(words)
    assert Replay("least-stale", 3).calls("DB A C E") == ". . B D"


def test_random_depends_on_the_seed_alone() -> None:
    words = "A B C D E F G H " * 6
    victims = [Replay("random", 4, seed=seed).calls(words) for seed in (0, 0, 1)]
    assert victims[0] == victims[1] != victims[2]


def test_random_draws_anew_after_each_event() -> None:
    replay = Replay("random", 2)
    assert set(replay.calls("A B C D E F G H " * 6).split()) == set(".ABCDEFGH")


def test_static_admits_only_what_its_profile_has_hotter() -> None:
    heat: Any = [3, 1, 2, 1, 0, 0, 0, 0]
    replay = Replay("static", 2, profile=heat)
    replay.calls("A B")
    assert replay.call("D") == "~D"  # as hot as B is not hotter
    assert replay.call("C") == "+C -B"
    assert replay.call("B") == "~B"
    assert replay.call("B", max_bypassed=0) == "+B -C"


def test_static_wants_a_profile_of_all_experts() -> None:
    policy_class: Any = POLICIES.load("static")
    with pytest.raises(ConfigError, match="profile has 3 values: give 8"):
        policy_class(8, 2, profile=[1, 2, 3])
