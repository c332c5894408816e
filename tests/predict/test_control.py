"""How much is prefetched: the budget holds, waste raises the threshold, what does not pay stops."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotexperts.errors import ConfigError
from hotexperts.predict import Control

SURE = [(expert, 0.999) for expert in range(8)]


def test_no_guess_before_a_miss_has_earned_it() -> None:
    control = Control(1, max_guesses=8, ratio=1.5)
    assert (control.choose(0, SURE), control.threshold) == ([], pytest.approx(0.95))
    control.record(0, num_missed=5, issued=0, used=0)
    assert control.credit == 2.5
    assert control.choose(0, SURE) == [0, 1]  # and not half an expert more
    assert control.credit == 0.5
    control.record(0, num_missed=2, issued=2, used=1)
    assert control.credit == 0.5 + 1 + 1


def test_waste_raises_the_threshold_and_misses_lower_it() -> None:
    control = Control(1, max_guesses=8, ratio=1.5)
    control.record(0, num_missed=60, issued=0, used=0)
    odds = 19 * math.exp(-0.1 * 30)
    assert control.threshold == pytest.approx(odds / (1 + odds))
    before = control.threshold
    control.choose(0, SURE)
    control.record(0, num_missed=0, issued=8, used=0)
    assert control.threshold > before
    control.record(0, num_missed=1000, issued=0, used=0)
    assert control.threshold == pytest.approx(1 / 11)  # where a guess is worth nothing


def test_the_likeliest_come_first_and_of_equals_the_lower_id() -> None:
    control = Control(1, max_guesses=3, ratio=None)
    candidates = [(4, 0.5), (0, 0.05), (3, 0.9), (2, 0.5), (1, 0.4)]
    assert control.choose(0, candidates) == [3, 2, 4]


def test_what_is_not_hidden_must_be_surer() -> None:
    control = Control(1, max_guesses=8, ratio=None)
    candidates = [(0, 0.9), (1, 0.8), (2, 0.7), (3, 0.6)]
    assert control.choose(0, candidates, hidden=[1.0, 0.25, 0.25, 1.0]) == [0, 1]
    assert control.choose(0, candidates, hidden=[1.0]) == [0]
    assert control.choose(0, candidates, hidden=[0.0, 1.0]) == []
    assert control.choose(0, [(0, 1.0)], hidden=[0.0]) == [0]  # costs nothing if it is sure


@given(
    ratio=st.sampled_from([1.0, 1.1, 1.5, 2.0]),
    calls=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 6), st.floats(0, 1), st.booleans()), max_size=80
    ),
)
def test_bytes_never_exceed_the_budget(
    ratio: float, calls: list[tuple[int, int, float, bool]]
) -> None:
    control = Control(3, max_guesses=6, ratio=ratio)
    missed = moved = 0
    for layer, num_missed, chance, is_right in calls:
        chosen = control.choose(layer, [(e, chance) for e in range(8)])
        assert len(chosen) <= 6
        used = min(len(chosen), num_missed) if is_right else 0
        control.record(layer, num_missed, len(chosen), used)
        missed += num_missed
        moved += num_missed - used + len(chosen)
        assert moved <= ratio * missed + 1e-9


def fail(control: Control, calls: int, issued: int) -> int:
    """Record wasted guesses until the layer is off: after how many calls."""
    for call in range(1, calls + 1):
        control.record(0, num_missed=0, issued=issued, used=0)
        if not control.layers[0].is_on:
            return call
    raise AssertionError("still on")


def test_a_layer_whose_guesses_are_always_wrong_is_switched_off_soon() -> None:
    control = Control(2, max_guesses=8, ratio=None)
    # .5 falls to .02 on its way to -.8: (63/64)^n (.5 + .8) < .82
    assert fail(control, 100, issued=8) == math.ceil(math.log(0.82 / 1.3) / math.log(63 / 64))
    assert control.choose(0, SURE) == []
    assert control.choose(1, SURE) == [e for e, _ in SURE]  # the other layer is not concerned


def test_a_layer_that_hits_everything_is_switched_off() -> None:
    control = Control(1, max_guesses=8)
    assert fail(control, 300, issued=0) == math.ceil(math.log(0.02 / 0.5) / math.log(63 / 64))


def test_it_is_tried_again_and_rests_longer_each_time() -> None:
    control = Control(1, max_guesses=8, ratio=None)
    rests = []
    for _ in range(7):
        fail(control, 300, issued=8)
        rests.append(0)
        while not control.layers[0].is_on:
            assert control.choose(0, SURE) == []
            control.record(0, num_missed=1, issued=0, used=0)
            rests[-1] += 1
    assert rests == [256, 512, 1024, 2048, 4096, 4096, 4096]


@pytest.mark.parametrize(("used", "is_on"), [(1, True), (0, False)])
def test_a_trial_decides_after_64_calls(used: int, is_on: bool) -> None:
    control = Control(1, max_guesses=8, ratio=None)
    fail(control, 300, issued=8)
    for _ in range(256):
        control.record(0, num_missed=1, issued=0, used=0)
    state = control.layers[0]
    assert (state.is_on, state.trial, state.payoff) == (True, 64, 0.05)
    for call in range(64):
        # a use every 16 calls is worth .0625 a call, one in the first call alone is not enough
        now = int(call % 16 == 0) if used else int(call == 0)
        control.record(0, num_missed=1, issued=now, used=now)
    assert (state.is_on, state.trial) == (is_on, 0)
    assert state.next_rest == (256 if is_on else 1024)


def test_between_the_two_levels_nothing_changes() -> None:
    """Hysteresis: .03 is too little to be switched on and too much to be switched off."""
    control = Control(1, max_guesses=8, ratio=None)
    for call in range(3000):
        now = int(call % 33 == 0)
        control.record(0, num_missed=1, issued=now, used=now)
    assert control.layers[0].is_on
    fail(control, 300, issued=8)
    for _ in range(256):
        control.record(0, num_missed=1, issued=0, used=0)
    for call in range(64):
        now = int(call % 33 == 0)
        control.record(0, num_missed=1, issued=now, used=now)
    assert not control.layers[0].is_on


def test_counters() -> None:
    control = Control(1, max_guesses=8, ratio=None)
    control.record(0, num_missed=3, issued=4, used=2, late=1)
    control.record(0, num_missed=3, issued=1, used=1)
    state = control.layers[0]
    assert (state.issued, state.used, state.late, state.wasted) == (5, 3, 1, 2)


def test_budgets_that_are_none() -> None:
    with pytest.raises(ConfigError, match=r"0\.9 times the bytes: give 1 or more"):
        Control(1, 8, 0.9)
    with pytest.raises(ConfigError, match="inf times the bytes"):
        Control(1, 8, math.inf)
    with pytest.raises(ConfigError, match="at most 0 guesses a call: give 1 or more"):
        Control(1, 0)
