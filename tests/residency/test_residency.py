from __future__ import annotations

import pytest

from hotexperts.residency import Residency
from hotexperts.types import Decision, Placement


def test_free_slots_are_used_lowest_first_then_victims_in_order() -> None:
    ledger = Residency(8, 3)
    assert ledger.apply(Decision((4, 6), (), ())) == [Placement(4, 0), Placement(6, 1)]
    # one free slot (2) goes to the lowest id, then 6's slot, then 4's, as the victims are listed
    placed = ledger.apply(Decision((0, 1, 7), (6, 4), ()))
    assert placed == [Placement(0, 2), Placement(1, 1), Placement(7, 0)]
    ledger.check()


def test_staged_experts_are_not_residents_and_leave_with_the_next_call() -> None:
    ledger = Residency(8, 2, num_staging=2)
    ledger.apply(Decision((0, 1), (), ()))
    assert ledger.stage([5, 7]) == [Placement(5, 2), Placement(7, 3)]
    assert sorted(ledger.residents) == [0, 1]
    assert ledger.stage([6]) == [Placement(6, 2)]
    assert ledger.slot_of[5] == ledger.slot_of[7] == -1
    ledger.check()


def test_discard_frees_the_slot() -> None:
    ledger = Residency(4, 2)
    ledger.apply(Decision((1, 2), (), ()))
    ledger.discard([2, 3])
    assert (ledger.num_free, ledger.slot_of[2]) == (1, -1)
    ledger.check()


def test_check_finds_a_map_that_lies() -> None:
    ledger = Residency(4, 2)
    ledger.apply(Decision((1,), (), ()))
    ledger.slot_of[3] = 0
    with pytest.raises(AssertionError):
        ledger.check()
