"""Score policies, worked by hand: exact float32 values, orders, bypass, and ADV's choice."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from hotexperts.policy import POLICIES
from hotexperts.policy.adv import HOME, LRU, SHADOWS
from hotexperts.types import Event
from policy.replay import Replay


def test_lfru_divides_uses_by_age() -> None:
    replay = Replay("lfru", 2)
    replay.calls("A A A B")
    assert (replay.score("A"), replay.score("B")) == (1.5, 1.0)  # 3 / 2, 1 / 1
    assert replay.calls("C D") == "B C"  # A is 3 / 3, B 1 / 2; then A 3 / 4, C 1 / 2
    assert replay.calls("D D D C") == ". . . A"  # A is 3 / 8, D 4 / 2


def test_lfru_rounds_once() -> None:
    replay = Replay("lfru", 2)
    replay.calls("A - -")
    assert replay.score("A") == float(np.float32(1) / np.float32(3))


def test_lfru_breaks_ties_by_expert_id() -> None:
    assert Replay("lfru", 2).calls("A A - B C") == ". . . . A"  # A is 2 / 4, B 1 / 2
    assert Replay("lfru", 2).calls("B B - A C") == ". . . . A"  # A is 1 / 2, B 2 / 4


def test_lcp_shrinks_a_count_with_age() -> None:
    replay = Replay("lcp", 2)
    replay.calls("A A B")
    assert replay.score("A") == float((np.float32(2) + np.float32(0.001)) * np.float32(0.9))
    # B was used once, one event ago: 1.001 x .9 = .901. A was used twice, the last time seven
    # events ago: 2.001 x .9^7 = .957, or eight: .861.
    assert Replay("lcp", 2).calls("A A - - - - - B C") == ". . . . . . . . B"
    assert Replay("lcp", 2).calls("A A - - - - - - B C") == ". . . . . . . . . A"


def test_lcp_knows_the_age_of_what_was_never_used_up_to_a_bound() -> None:
    replay = Replay("lcp", 2, num_experts=3)
    replay.calls("A - -")  # ages count from -1: three events
    assert replay.score("C") == float(np.float32(0.001) * np.float32(0.9**3))
    replay.calls("A " * 700)
    assert replay.score("C") == float(np.float32(0.001) * np.float32(0.9**511))
    assert replay.score("C") > 1e-30


def test_ewma_adds_uses_and_decays() -> None:
    replay = Replay("ewma", 2)
    replay.calls("A A B")
    d, one = np.float32(0.95), np.float32(1)
    assert replay.score("A") == float(d * (d * one + one))  # 1.85
    assert replay.calls("C D") == "B C"  # A 1.76, B .95; then A 1.67, C .95
    assert replay.calls("D B") == ". A"  # D's two uses make 1.85, A is down to 1.51


@pytest.mark.parametrize("name", ["ewma", "auto", "adv"])
def test_what_is_long_forgotten_is_zero_and_never_denormal(name: str) -> None:
    policy: Any = POLICIES.load(name)(3, 2)
    tiny = np.finfo(np.float32).tiny
    policy.record(Event([0], [1], (), evict=True))
    for _ in range(8000):
        policy.record(Event([1], [1], (1,), evict=True))
        values = policy.score if name == "ewma" else policy.averages.rows
        assert ((values == 0) | (values >= tiny)).all()
    assert policy.eviction_key(0) == 0.0


def test_auto_mixes_a_fast_and_a_slow_average() -> None:
    replay = Replay("auto", 4)
    replay.call("AAAAB")  # four tokens: m = 2
    a, b, wf, ws = map(np.float32, (0.4, 0.6, 0.2, 0.03))
    two = np.float32(2)
    assert replay.score("A") == float((a * (wf * two)) + (b * (ws * two)))
    assert replay.score("B") == float((a * wf) + (b * ws))
    fast, slow = np.float32(0.8) * (wf * two), np.float32(0.97) * (ws * two)
    replay.call("B")
    assert replay.score("A") == float((a * fast) + (b * slow))


def busy() -> Replay:
    """Five slots, A to E resident at .350 each; one event later they are at .293.

    A miss with one token starts at .4 x .2 + .6 x .03 = .098.
    """
    replay = Replay("auto", 5)
    replay.calls("AABBCCDDEE " * 3)
    return replay


def test_auto_admits_by_force_in_a_light_call() -> None:
    # 3 of 5 slots is exactly .6.
    assert busy().call("FGH") == "+FGH -ABC"


def test_auto_lets_weak_misses_pass_by_in_a_busy_call() -> None:
    replay = busy()
    assert replay.call("AFGH") == "~FGH"
    # Sixteen tokens lift H to .473, above B's .246; F and G, used twice, are at .179.
    assert replay.call("AFG" + "H" * 16) == "+H -B ~FG"


def test_auto_gives_free_slots_to_the_strongest_misses() -> None:
    # One slot of four is free. G, with four tokens, is at .196, E and F are at .098.
    replay = Replay("auto", 4)
    replay.call("ABC")  # at .098, one event later at .082: E and F win
    assert replay.call("EFGGGG") == "+EFG -AB"
    replay = Replay("auto", 4)
    replay.call("AABBCC")  # at .139, one event later at .115: E and F lose
    assert replay.call("EFGGGG") == "+G ~EF"
    replay = Replay("auto", 4)
    replay.call("AABBCC")
    assert replay.call("DEF") == "+D ~EF"  # of equal misses the lower id


def test_auto_needs_a_strictly_higher_score() -> None:
    replay = Replay("auto", 2, a=1.0, df=0.5, ds=0.5)
    replay.call("AAAABBBB")  # two slots, two experts: busy; f = .5 x 2 = 1
    assert replay.call("CD") == "~CD"  # .5 against .5
    assert replay.call("CD") == "+CD -AB"  # .75 against .25


def test_auto_bypasses_no_more_than_it_may() -> None:
    # F, G, H would all pass by; the strongest, of equals the lower id, must enter.
    assert busy().call("AFGH", max_bypassed=3) == "~FGH"
    assert busy().call("AFGH", max_bypassed=2) == "+F -B ~GH"
    assert busy().call("AFGGH", max_bypassed=2) == "+G -B ~FH"
    assert busy().call("AFGH", max_bypassed=0) == "+FGH -BCD"


def test_auto_over_capacity_keeps_the_limit_apart_from_what_must_pass_by() -> None:
    # Six misses, A and B may leave: four pass by in any case, of the other two one may.
    replay = Replay("auto", 2)
    replay.call("A" * 9 + "B" * 9)
    assert replay.call("CDEFGH", max_bypassed=1) == "+C -A ~DEFGH"


def test_auto_in_a_prefill_gives_free_slots_to_the_strongest() -> None:
    replay = Replay("auto", 3)
    replay.call("A")
    assert replay.call("BCCCDEE", evict=False) == "+CE ~BD"


def test_adv_decides_as_auto_while_no_shadow_is_better() -> None:
    auto, adv = Replay("auto", 2), Replay("adv", 2)
    for replay in (auto, adv):
        replay.calls("AB " * 20)
    assert adv.policy.index == HOME
    assert adv.policy.score.tolist() == auto.policy.score.tolist()
    assert adv.calls("C D") == auto.calls("C D") == "A C"


def test_adv_changes_over_to_the_mix_that_hits() -> None:
    # A and B were used for long. C, D, C: AUTO's slow average keeps B, so that C and D take
    # turns in one slot. The shadow with a = 1, df = .5 lets A and B go and hits at the second
    # C, the only one to do so: its score is used at once, and it makes room at B's expense.
    auto, adv = Replay("auto", 2), Replay("adv", 2)
    for replay in (auto, adv):
        replay.calls("AB " * 20)
    assert auto.calls("C D C") == "A C D"
    assert adv.calls("C D C") == "A C B"
    assert adv.policy.index == 0
    assert np.flatnonzero(adv.policy.held[0]).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("worth", "index"),
    [
        ({}, HOME),
        ({4: 1001}, HOME),  # within 1.002 of index 2
        ({4: 1003}, 4),
        ({4: 1003, 5: 1003}, 4),  # the lowest of equals
        ({1: 1003, 5: 1004}, 5),
        ({1: 1003, HOME: 1002}, HOME),
        ({LRU: 1001}, HOME),
        ({LRU: 1003}, LRU),
        ({6: 1003, LRU: 1003}, 6),
    ],
)
def test_adv_leaves_its_home_only_for_a_clear_winner(worth: dict[int, int], index: int) -> None:
    policy: Any = POLICIES.load("adv")(8, 4)
    policy.worth[:] = 1000
    for shadow, value in worth.items():
        policy.worth[shadow] = value
    policy.decide([], [], (), 4)  # decays all alike
    assert policy.index == index


def test_adv_judges_hits_before_the_shadows_move() -> None:
    replay = Replay("adv", 2)
    replay.calls("A AB")
    assert replay.policy.worth.tolist() == [1.0] * 8  # LRU's is the last
    replay.call("AB")
    assert replay.policy.worth.tolist() == [float(np.float32(0.99) + np.float32(2))] * 8


def test_adv_does_as_lru_where_it_falls_behind_lru() -> None:
    policy: Any = POLICIES.load("adv")(8, 4)
    policy.regret[:] = 2.1
    policy.decide([0, 1], [9, 9], (), 4)  # 2.0979 is less than twice two
    assert policy.index == HOME
    policy.regret[:] = 2.1
    found = policy.decide([2], [1], (0, 1), 0)
    assert policy.index == LRU
    assert policy.regret[0] == np.float32(0.999) * np.float32(2.1)
    assert (found.admitted, found.victims) == ((2,), (0,))  # the lower id of one event


def test_adv_as_lru_lets_everybody_in() -> None:
    # A busy call, in which AUTO would turn C and D away: LRU lets them in for the oldest two.
    for regret, expected in ((0, "~CD"), (99, "+CD -AB")):
        replay = Replay("adv", 4)
        replay.calls("AAAAAABBBBBB " * 9)
        replay.calls("EF " * 2)
        replay.policy.regret[:] = regret
        assert replay.call("CDEF") == expected


def test_adv_counts_hits_that_lru_has_more() -> None:
    replay = Replay("adv", 2)
    replay.calls("AB " * 21 + "C D C")  # LRU hits the last, ADV does not: see test_shadow
    assert replay.policy.regret.tolist() == [1.0]
    replay.call("D")
    assert replay.policy.regret.tolist() == [float(np.float32(0.999)) + 0.0]


def test_adv_shadows_do_not_evict_in_a_prefill() -> None:
    replay = Replay("adv", 2)
    replay.call("A")
    replay.call("BBCCCCD", evict=False)
    for held in replay.policy.held:
        assert np.flatnonzero(held).tolist() == [0, 2]  # A, and C for the free slot


def test_adv_shadows_are_autos_of_their_own() -> None:
    draw = random.Random(0)
    adv = Replay("adv", 5, num_experts=12)
    autos = [Replay("auto", 5, num_experts=12, a=a, df=df, ds=ds) for a, df, ds in SHADOWS]
    for _ in range(200):
        letters = "".join(draw.choices("ABCDEFGHIJKL", range(1, 13), k=draw.randint(0, 9)))
        evict = draw.random() < 0.9
        for replay in [adv, *autos]:
            replay.decide(letters, evict=evict)
        shadows = [np.flatnonzero(held).tolist() for held in adv.policy.held]
        assert shadows == [sorted(auto.ledger.residents) for auto in autos]
    assert len(set(map(tuple, shadows))) > 1  # they do differ
