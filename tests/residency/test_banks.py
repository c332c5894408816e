"""Which rows of the banks hold what, by hand."""

from __future__ import annotations

import pytest

from hotexperts.banks import BankLedger, BankPart


def filled(ledger: BankLedger, bank: int, layer: int, experts: list[int]) -> None:
    with ledger.copying(bank, layer, ledger.lacking(bank, layer, experts)):
        pass


def test_unknown_banks_are_filled_in_turn() -> None:
    parts = BankLedger(2).parts(0, [3, 5, 7, 8, 9])
    assert parts == [
        BankPart({3: 0, 5: 1}, [(3, 0), (5, 1)]),
        BankPart({7: 0, 8: 1}, [(7, 0), (8, 1)]),
        BankPart({9: 0}, [(9, 0)]),
    ]


def test_what_is_there_is_used_where_it_is() -> None:
    """5 came ahead into bank 0, 8 into bank 1; the rows beside them take others."""
    ledger = BankLedger(2)
    filled(ledger, 0, 4, [1, 5])
    filled(ledger, 1, 4, [8])
    assert ledger.parts(4, [3, 5, 7, 8, 9]) == [
        BankPart({5: 1, 3: 0}, [(3, 0)]),
        BankPart({8: 0, 7: 1}, [(7, 1)]),
        BankPart({9: 0}, [(9, 0)]),
    ]


def test_a_bank_may_have_nothing_to_do() -> None:
    ledger = BankLedger(2)
    filled(ledger, 1, 4, [8])
    assert ledger.parts(4, [8]) == [BankPart({}, []), BankPart({8: 0}, [])]


def test_no_expert_is_served_twice() -> None:
    ledger = BankLedger(2)
    filled(ledger, 0, 4, [8])
    filled(ledger, 1, 4, [8])
    assert ledger.parts(4, [8]) == [BankPart({8: 0}, [])]


def test_other_layers_rows_are_not_ours() -> None:
    ledger = BankLedger(1)
    filled(ledger, 0, 4, [8])
    assert ledger.lacking(0, 4, [8]) == []
    assert ledger.parts(5, [8]) == [BankPart({8: 0}, [(8, 0)])]


def test_nobody_knows_rows_whose_copies_broke_off() -> None:
    ledger = BankLedger(2)
    filled(ledger, 0, 4, [6, 7])
    with pytest.raises(KeyboardInterrupt), ledger.copying(0, 4, [(9, 1)]):
        raise KeyboardInterrupt
    assert ledger.lacking(0, 4, [6, 7]) == [(7, 1)]
    ledger.forget(0)
    assert ledger.lacking(0, 4, [6, 7]) == [(6, 0), (7, 1)]
