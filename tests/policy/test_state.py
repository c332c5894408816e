"""A policy's memory goes through JSON and back, and fits nowhere else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotexperts.errors import ConfigError
from hotexperts.policy import POLICIES, Policy
from hotexperts.policy.lru import LRU
from hotexperts.residency import Residency
from hotexperts.types import Decision, Event
from policy.replay import Replay
from strategies import cache_shapes, demands

NAMES = POLICIES.names()


def fresh(name: str, num_experts: int = 8, capacity: int = 3, **options: Any) -> Any:
    policy_class: Any = POLICIES.load(name)
    return policy_class(num_experts, capacity, **options)


def through_json(policy: Policy) -> Any:
    return json.loads(json.dumps(policy.state(), allow_nan=False))


@st.composite
def events(draw: st.DrawFn, num_experts: int) -> list[tuple[dict[int, int], bool, int]]:
    """Demand with counts, whether to evict, and how many more may pass by."""
    one = st.tuples(demands(num_experts), st.booleans(), st.integers(0, 3))
    return draw(st.lists(one, max_size=25))


def play(
    policy: Policy, ledger: Residency, script: list[tuple[dict[int, int], bool, int]]
) -> list[Decision]:
    log = []
    for tokens, evict, limit in script:
        demand = sorted(tokens)
        counts = [tokens[expert] for expert in demand]
        options: dict[str, Any] = {"evict": evict, "max_bypassed": limit}
        log.append(policy.decide(demand, counts, ledger.residents, ledger.num_free, **options))
        ledger.apply(log[-1])
    return log


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_policy_decides_as_the_one_that_was_saved(name: str) -> None:
    @settings(max_examples=40, deadline=None)
    @given(cache_shapes(), st.data(), st.booleans())
    def check(shape: tuple[int, int], data: st.DataObject, lose: bool) -> None:
        first, twice = Residency(*shape), Residency(*shape)
        old, new = fresh(name, *shape), fresh(name, *shape)
        script = data.draw(events(shape[0]))
        play(old, first, script)
        play(twin := fresh(name, *shape), twice, script)
        play(new, Residency(*shape), data.draw(events(shape[0])))  # is to be forgotten
        state = through_json(old)
        new.restore(state)
        assert new.state() == state == twin.state()
        if lose:  # a cache that starts empty, as after a restart
            first.reset()
            twice.reset()
        script = data.draw(events(shape[0]))
        assert play(old, first, script) == play(new, twice, script)
        assert old.state() == new.state()

    check()


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_a_copy(name: str) -> None:
    replay = Replay(name, 3)
    replay.calls("A B AC D E A")
    state = replay.policy.state()
    text = json.dumps(state)
    restored = fresh(name)
    restored.restore(state)
    play(restored, Residency(8, 3), [({0: 1, 5: 2}, True, 3)] * 3)
    replay.calls("F G H A B")
    assert json.dumps(state) == text


def test_a_state_says_whose_it_is() -> None:
    replay = Replay("lru-2", 2, num_experts=3)
    replay.calls("A B A")
    assert through_json(replay.policy) == {
        "policy": "lru-2",
        "settings": {"num_experts": 3, "capacity": 2},
        "history": {"tick": 3, "last_use": [2, 1, -1], "second_last_use": [0, -1, -1]},
    }


def test_restored_shadows_go_on_counting() -> None:
    replay = Replay("adv", 2)
    replay.calls("A AB B")
    restored = fresh("adv", 8, 2)
    restored.restore(through_json(replay.policy))
    assert restored.shadow_hits() == replay.policy.shadow_hits()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (fresh("lfu"), "state of policy 'lfu', this one is 'auto'"),
        (fresh("adv"), "state of policy 'adv', this one is 'auto'"),
        (fresh("auto", 9), "with num_experts 9, this one has 8: restore it where both are equal"),
        (fresh("auto", 8, 4), "with capacity 4, this one has 3"),
        (fresh("auto", a=0.3), r"with a 0\.3, this one has 0\.4"),
    ],
)
def test_a_state_fits_only_its_own_kind(other: Any, message: str) -> None:
    policy = fresh("auto")
    with pytest.raises(ConfigError, match=message):
        policy.restore(through_json(other))


def test_settings_of_a_policy_count_too() -> None:
    with pytest.raises(ConfigError, match="with seed 1, this one has 0"):
        fresh("random").restore(fresh("random", seed=1).state())
    with pytest.raises(ConfigError, match="with heat "):
        fresh("static").restore(fresh("static", profile=range(8)).state())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: None, "not the state of a policy: give a mapping of policy"),
        (lambda state: {"policy": "adv"}, "not the state of a policy"),
        (lambda state: state | {"history": {"tick": 1}}, "has not the history tick, "),
        (lambda state: state | {"settings": []}, "has not the settings num_experts, capacity"),
        (lambda state: put(state, "worth", [1, 2]), r"worth is damaged \(shape \(2,\), not \(8,\)"),
        (lambda state: put(state, "totals", [1]), r"totals is damaged \(1 values, not 3\)"),
        (lambda state: put(state, "tick", "now"), r"tick is damaged \('now', not a number\)"),
        (lambda state: put(state, "lru_shadow.order", 7), r"lru_shadow\.order is damaged"),
    ],
)
def test_a_damaged_state_changes_nothing(damage: Any, message: str) -> None:
    replay = Replay("adv", 3)
    replay.calls("A AB C")
    before = replay.policy.state()
    with pytest.raises(ConfigError, match=message):
        replay.policy.restore(damage(through_json(replay.policy)))
    assert replay.policy.state() == before


def put(state: Any, name: str, value: Any) -> Any:
    return state | {"history": state["history"] | {name: value}}


def test_a_policy_that_does_not_name_its_history_cannot_be_saved() -> None:
    class Forgetful(LRU):
        name = "forgetful"

        def reset(self) -> None:
            super().reset()
            self.seen = np.zeros(self.num_experts)

    policy = Forgetful(8, 3)
    for call in (policy.state, lambda: policy.restore({})):
        with pytest.raises(ConfigError, match="Forgetful must name in `history` what its `reset`"):
            call()


class Own(Policy):
    """A user's policy, which the registry does not know and which has no name there."""

    def record(self, event: Event) -> None:
        self.tick += 1

    def eviction_key(self, expert: int) -> int:
        return expert


def test_a_policy_of_ones_own_is_saved_by_its_class() -> None:
    policy = Own(4, 2)
    policy.decide([1], [1], [], 2)
    saved = json.loads(json.dumps(policy.state()))
    assert saved["policy"].endswith(":Own")
    other = Own(4, 2)
    other.restore(saved)
    assert other.tick == 1
