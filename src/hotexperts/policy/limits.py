"""What a policy's memory can be at all: a saved one that is not would fail in some later event."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from hotexperts.errors import ConfigError

if TYPE_CHECKING:
    from hotexperts.policy.base import Policy

MOST_EVENTS = 2**31 - 1  # times are int32


def named(policy: Policy, field: str) -> list[str]:
    """What the classes of a policy name in a field, the base's first.

    Raises:
        ConfigError: one has a `reset` of its own and names no history.
    """
    names: list[str] = []
    for kind in reversed(type(policy).__mro__):
        if "reset" in vars(kind) and "history" not in vars(kind):
            raise ConfigError(
                f"policy {label(policy)!r} cannot be saved: {kind.__name__} must name in "
                "`history` what its `reset` makes: add that, or do without a warm start"
            )
        names.extend(name for name in vars(kind).get(field, ()) if name not in names)
    return names


def label(policy: Policy) -> str:
    """Its name in the registry, or its class's own."""
    kind = type(policy)
    return getattr(policy, "name", None) or f"{kind.__module__}:{kind.__qualname__}"


def check_limits(policy: Policy) -> None:
    """Whether times, counts and amounts are such, and what the policy itself knows of its queues.

    Raises:
        ValueError: one is not; its name is in the message.
    """
    _check_field(policy, "tick", 0, MOST_EVENTS - 1)
    limits = {"times": (-1, policy.tick), "counts": (0, policy.tick), "amounts": (0, math.inf)}
    for field, (lowest, highest) in limits.items():
        for name in named(policy, field):
            _check_field(policy, name, lowest, highest)
    policy.check_history()


def _check_field(policy: Policy, name: str, lowest: int, highest: float) -> None:
    values: Any = np.asarray(attrgetter(name)(policy), np.float64)
    if not ((lowest <= values) & (values <= highest)).all():
        most = "" if highest == math.inf else f" or above {highest}"
        raise ValueError(f"{name} is damaged (a value below {lowest}{most})")
