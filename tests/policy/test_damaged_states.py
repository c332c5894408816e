"""A damaged state is refused when it is loaded, or every later event can be decided."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from hotexperts.errors import ConfigError
from hotexperts.policy import POLICIES
from hotexperts.residency import Residency
from policy.replay import Replay
from policy.test_state import fresh, put, through_json

NUMBERS = (None, True, -1, -2, 0, 3, 7, 100, 10**6, 2**31 - 1, -(2**31), 2**40, 0.5, -0.5, 1e18)
LATER = "A BC DEF ABCDEFGH G H AB CD EF GH A A B"
pytestmark = pytest.mark.filterwarnings("error")  # of NumPy: an overflow, a division by zero


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every number and every list; of long lists the first values."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(min(len(value), 12)):
            yield (*at, key)
            yield from places(value[key], (*at, key))


def damaged(history: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The history with one of its values replaced, or one of its lists cut, grown or turned."""
    for place in places(history):
        *way, last = place
        old: Any = history
        for key in place:
            old = old[key]
        lists = (old[:-1], [*old, *old[:1]], old[::-1], []) if isinstance(old, list) else ()
        for value in lists or NUMBERS:
            found: Any = copy.deepcopy(history)
            owner = found
            for key in way:
                owner = owner[key]
            owner[last] = value
            yield found


def play_on(policy: Any, slot_of: list[int]) -> None:
    ledger = Residency(8, 3)
    ledger.restore(slot_of)
    for word in LATER.split():
        demand = [ord(letter) - ord("A") for letter in word]
        counts = [1] * len(demand)
        ledger.apply(policy.decide(demand, counts, ledger.residents, ledger.num_free))
    ledger.check()
    fresh(policy.name).restore(through_json(policy))


@pytest.mark.parametrize("name", POLICIES.names())
def test_what_is_not_refused_can_be_played_on(name: str) -> None:
    replay = Replay(name, 3)
    replay.calls("A B AC D E A B F")
    state = through_json(replay.policy)
    untouched = json.dumps(state)
    policy = fresh(name)
    num_refused = 0
    for history in damaged(state["history"]):
        policy.restore(state)
        try:
            policy.restore(state | {"history": history})
        except ConfigError:
            num_refused += 1
            assert json.dumps(policy.state()) == untouched
        else:
            play_on(policy, list(replay.ledger.slot_of))
    assert num_refused > 5


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("lcp", "last_use", [9] * 8, r"'lcp': last_use is damaged \(a value below -1 or above 8\)"),
        ("lcp", "count", [-1] * 8, r"count is damaged \(a value below 0 or above 8\)"),
        ("auto", "averages.rows", [[-1] * 8] * 2, r"averages\.rows is damaged \(a value below 0\)"),
        ("lru", "tick", 2**31, r"tick is damaged \(a value below 0 or above 2147483646\)"),
        ("lru", "tick", None, r"tick is damaged \(None, not a whole number\)"),
        ("lfru", "count", [0.5] * 8, r"count is damaged \(not all are int32\)"),
        ("adv", "held", [[1] * 8] * 7, r"held is damaged \(not all are bool\)"),
        ("adv", "held", [[True] * 8] * 7, r"a shadow is damaged \(8 experts in 3 slots\)"),
        ("sieve", "hand", 6, r"hand is damaged \(at 6, who is not resident\)"),
        ("s3-fifo", "small", [], r"small, main are damaged \(they do not hold who is known"),
        ("lirs", "stack", [], r"stack and lir are damaged"),
    ],
)
def test_what_cannot_be_is_named(name: str, field: str, value: Any, message: str) -> None:
    replay = Replay(name, 3)
    replay.calls("A B AC D E A B F")
    with pytest.raises(ConfigError, match=message):
        fresh(name).restore(put(through_json(replay.policy), field, value))
