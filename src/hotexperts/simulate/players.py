"""Policies under a replay's rules: ties as the router lists, and pools that layers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hotexperts.errors import ConfigError
from hotexperts.policy import POLICIES, Policy
from hotexperts.policy.serial import Serial
from hotexperts.policy.w_tinylfu import WTinyLFU
from hotexperts.simulate.pool import POOLED, Floored
from hotexperts.simulate.rules import Rules
from hotexperts.types import Event

Create = Callable[[int, int], Policy]


def player(name: str, num_layers: int, rules: Rules) -> Create:
    """What makes a policy for a number of experts and of slots.

    Raises:
        ConfigError: an unknown policy, or one that cannot follow the rules.
    """
    if rules.pool == "global":
        return _pooled(name, num_layers, rules)
    if name in POOLED and name not in POLICIES.names():
        raise ConfigError(f"policy {name!r} is one of a global pool: give pool 'global'")
    chosen = POLICIES.load(name)
    return _listed(name, chosen) if rules.ties == "listed" else chosen


def _pooled(name: str, num_layers: int, rules: Rules) -> Create:
    if name not in POOLED:
        raise ConfigError(
            f"policy {name!r} has no score that layers can share: give pool 'layer', or one of "
            f"{', '.join(POOLED)}"
        )
    chosen = POOLED[name]
    kind = _listed(name, chosen) if rules.ties == "listed" else chosen
    if not rules.pool_floor:
        return lambda num_experts, num_slots: kind(num_experts, num_slots, num_layers=num_layers)
    floored: Any = type("Floored", (Floored, kind), {"floor": rules.pool_floor})
    return lambda num_experts, num_slots: floored(num_experts, num_slots, num_layers=num_layers)


def _listed(name: str, chosen: type[Policy]) -> Any:
    """The policy with ties broken by recency and, within a call, by the router's order."""
    if issubclass(chosen, (Serial, WTinyLFU)) or chosen.decide is not Policy.decide:
        raise ConfigError(
            f"policy {name!r} keeps an order of its own, without ties: give ties 'id'"
        )
    return type("Listed", (_Listed, chosen), {})


class _Listed(Policy):
    """Of equal scores the older use leaves first, and of one call the one listed later."""

    def reset(self) -> None:
        """Forget who was listed when."""
        super().reset()
        self.listed_at: dict[int, tuple[int, int]] = {}
        self.num_calls = 0

    def record(self, event: Event) -> None:
        """Stamp the demand, whose order is the router's."""
        super().record(event)  # type: ignore[safe-super]  # the policy's, which comes after us
        self.num_calls += 1
        for place, expert in enumerate(event.demand):
            self.listed_at[expert] = self.num_calls, -place

    def eviction_key(self, expert: int) -> Any:
        """The policy's key, then the last use in the router's order."""
        key = super().eviction_key(expert)  # type: ignore[safe-super]
        return key, self.listed_at.get(expert, (0, 0))
