"""What every policy must keep, whoever wrote it: parametrised over the registry."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotexperts.errors import ConfigError, UnknownNameError
from hotexperts.policy import POLICIES, Policy
from hotexperts.policy.lru import LRU
from hotexperts.residency import Residency
from strategies import cache_shapes, demands

NAMES = POLICIES.names()


class PolicyMachine(RuleBasedStateMachine):
    """Drives a policy and a ledger together through arbitrary events."""

    policy_class: type[Policy] = LRU

    @initialize(shape=cache_shapes())
    def start(self, shape: tuple[int, int]) -> None:
        self.num_experts, self.capacity = shape
        self.policy = self.policy_class(self.num_experts, self.capacity)
        self.ledger = Residency(self.num_experts, self.capacity)

    @rule(data=st.data(), evict=st.booleans(), limit=st.none() | st.integers(0, 3))
    def event(self, data: st.DataObject, evict: bool, limit: int | None) -> None:
        tokens = data.draw(demands(self.num_experts))
        demand = sorted(tokens)
        before, free = set(self.ledger.residents), self.ledger.num_free
        decision = self.policy.decide(
            demand, [tokens[e] for e in demand], before, free, evict=evict, max_bypassed=limit
        )
        misses = set(demand) - before
        admitted, victims, bypassed = map(
            list, (decision.admitted, decision.victims, decision.bypassed)
        )
        assert sorted(admitted + bypassed) == sorted(misses)
        assert admitted == sorted(admitted)
        assert bypassed == sorted(bypassed)
        assert len(set(victims)) == len(victims)
        assert set(victims) <= before - set(demand)
        used_free = min(len(admitted), free)
        assert len(victims) == len(admitted) - used_free
        assert evict or not victims
        could_leave = len(before - set(demand)) if evict else 0
        unavoidable = max(0, len(misses) - free - could_leave)
        if limit is not None:
            assert len(bypassed) <= unavoidable + limit
        placements = self.ledger.apply(decision)
        assert [p.expert for p in placements] == admitted

    @rule()
    def reset(self) -> None:
        self.policy.reset()
        self.ledger.reset()

    @invariant()
    def ledger_is_sound(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.check()


@pytest.mark.parametrize("name", NAMES)
def test_any_sequence_of_events_keeps_the_contract(name: str) -> None:
    machine = type("Machine", (PolicyMachine,), {"policy_class": POLICIES.load(name)})
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
    case("runTest").runTest()


def test_the_contract_refutes_a_policy_that_evicts_what_the_call_needs() -> None:
    """The test of the test: a policy that ignores the demand must not pass."""

    class Greedy(LRU):
        def decide(self, demand: Any, counts: Any, resident: Any, free: int, **options: Any) -> Any:
            found = super().decide(demand, counts, resident, free, **options)
            others = sorted(resident)
            victims = tuple(others[: len(found.victims)])
            return type(found)(found.admitted, victims, found.bypassed)

    machine = type("Machine", (PolicyMachine,), {"policy_class": Greedy})
    case = machine.TestCase
    case.settings = settings(phases=[Phase.generate], deadline=None)  # no need to shrink
    with pytest.raises(AssertionError):
        case("runTest").runTest()


@pytest.mark.parametrize("name", NAMES)
def test_reset_equals_a_fresh_policy(name: str) -> None:
    policy_class = POLICIES.load(name)
    used, fresh = policy_class(9, 4), policy_class(9, 4)
    _run(used, seed=1)
    used.reset()
    assert _run(used, seed=2) == _run(fresh, seed=2)


def _run(policy: Policy, seed: int) -> list[Any]:
    draw, ledger, log = random.Random(seed), Residency(9, 4), []
    for _ in range(60):
        demand = sorted(draw.sample(range(9), draw.randint(0, 5)))
        decision = policy.decide(demand, [1] * len(demand), ledger.residents, ledger.num_free)
        ledger.apply(decision)
        log.append(decision)
    return log


def test_a_policy_loads_from_a_module_path() -> None:
    assert POLICIES.load("hotexperts.policy.lru:LRU") is LRU


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=f"choose one of {', '.join(POLICIES.names())}"):
        POLICIES.load("clairvoyant")
    with pytest.raises(UnknownNameError, match=r"cannot load policy 'no\.such:Thing'"):
        POLICIES.load("no.such:Thing")
    with pytest.raises(ConfigError, match="must extend it"):
        POLICIES.load("hotexperts.types:Decision")
