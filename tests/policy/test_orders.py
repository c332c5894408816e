"""Each policy's own order, worked by hand. Experts are letters (`Replay`)."""

from __future__ import annotations

from policy.replay import Replay


def test_lru_evicts_the_oldest_use() -> None:
    # A B fill both slots, A is used again, so C takes B's place, then B takes A's.
    assert Replay("lru", 2).calls("A B A C B") == ". . . B A"


def test_lru_breaks_ties_by_expert_id() -> None:
    # D and B were used by the same call: the lower id leaves first.
    assert Replay("lru", 3).calls("DB A C E") == ". . B D"


def test_fifo_ignores_uses() -> None:
    assert Replay("fifo", 2).calls("A B A A C") == ". . . . A"


def test_lfu_keeps_the_frequent() -> None:
    # A was used three times, B once but later: LRU would evict A, LFU evicts B.
    assert Replay("lfu", 2).calls("A A A B C") == ". . . . B"


def test_lfu_counts_experts_that_are_not_resident() -> None:
    # B comes back with its two old uses and beats C's one.
    assert Replay("lfu", 2).calls("B B A A A C B A D") == ". . . . . B C . B"


def test_lfu_ages_so_that_an_old_hot_set_leaves() -> None:
    replay = Replay("lfu", 2)
    replay.calls("A " * 19 + "B")  # 20 uses = 10 x capacity: A's 19 become 9.5
    replay.calls("B " * 9)  # B: 0.5 + 9 = 9.5 as well, and younger
    assert replay.call("C") == "+C -A"


def test_slru_prefers_victims_on_probation() -> None:
    # A hits once and is protected; B is younger but on probation.
    assert Replay("slru", 2).calls("A A B C") == ". . . B"


def test_slru_demotes_the_oldest_protected() -> None:
    # Capacity 4 protects 3. All four hit in turn: A, hit first, is back on probation.
    replay = Replay("slru", 4)
    replay.calls("A B C D A B C D")
    assert replay.call("E") == "+E -A"


def test_an_expert_that_the_call_still_needs_is_not_evicted() -> None:
    # A is the oldest, but the call that needs C needs A too.
    assert Replay("lru", 2).calls("A B AC") == ". . B"


def test_a_prefill_takes_free_slots_only() -> None:
    replay = Replay("lru", 3)
    replay.calls("A B")
    assert replay.call("CDE", evict=False) == "+C ~DE"
    assert replay.residents() == "ABC"


def test_a_demand_over_capacity_keeps_its_residents_and_admits_by_id() -> None:
    replay = Replay("lru", 3)
    replay.calls("B D H")
    assert replay.call("BCEF") == "+CE -DH ~F"  # only two can leave
    assert replay.residents() == "BCE"
