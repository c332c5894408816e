"""A policy's memory as plain values, and back.

A class names what makes it up once, in `Policy.settings` and `Policy.history`. An attribute may be
None, a bool or a number, a list, set or dict of these, a NumPy array or a `random.Random`. What an
attribute is says how to read its plain form: lists and arrays keep their size, sets and dicts need
not.
"""

from __future__ import annotations

import random
import reprlib
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from hotexperts.errors import ConfigError
from hotexperts.policy.limits import check_limits, label, named

if TYPE_CHECKING:
    from hotexperts.policy.base import Policy

FIELDS = ("policy", "settings", "history")


def save_state(policy: Policy) -> dict[str, Any]:
    """See `Policy.state`."""
    settings, history = named(policy, "settings"), named(policy, "history")
    return {
        "policy": label(policy),
        "settings": {name: _plain(attrgetter(name)(policy)) for name in settings},
        "history": {name: _plain(attrgetter(name)(policy)) for name in history},
    }


def load_state(policy: Policy, state: Mapping[str, Any]) -> None:
    """See `Policy.restore`."""
    known = save_state(policy)
    _check(known, state)
    try:
        _take(policy, state["history"])
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        _take(policy, known["history"])
        raise ConfigError(f"state of policy {label(policy)!r}: {error}: save it anew") from error


def _take(policy: Policy, history: Mapping[str, Any]) -> None:
    """Forget everything, then know this.

    Raises:
        ValueError: it cannot be; some of it is known then.
    """
    policy.reset()  # its values say of which kind each has to be
    for name, plain in history.items():
        try:
            value = _revived(attrgetter(name)(policy), plain, policy.num_experts)
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{name} is damaged ({error})") from error
        owner, _, last = name.rpartition(".")
        setattr(attrgetter(owner)(policy) if owner else policy, last, value)
    check_limits(policy)


def _check(wanted: dict[str, Any], state: Mapping[str, Any]) -> None:
    """Whether a state is whole and of such a policy."""
    if not isinstance(state, Mapping) or set(state) != set(FIELDS):
        raise ConfigError(f"not the state of a policy: give a mapping of {', '.join(FIELDS)}")
    if state["policy"] != wanted["policy"]:
        raise ConfigError(
            f"state of policy {state['policy']!r}, this one is {wanted['policy']!r}: "
            "restore it into a policy of its own kind"
        )
    for field in FIELDS[1:]:
        if not isinstance(state[field], Mapping) or set(state[field]) != set(wanted[field]):
            raise ConfigError(
                f"state of policy {wanted['policy']!r} has not the {field} "
                f"{', '.join(wanted[field])}: save it anew"
            )
    for name, value in wanted["settings"].items():
        if state["settings"][name] != value:
            raise ConfigError(
                f"state of policy {wanted['policy']!r} with {name} "
                f"{reprlib.repr(state['settings'][name])}, this one has {reprlib.repr(value)}: "
                "restore it where both are equal"
            )


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, random.Random):
        version, words, gauss = value.getstate()
        return [version, list(words), gauss]
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, dict):
        return [[key, _plain(item)] for key, item in value.items()]  # in order, whatever the keys
    return list(value) if isinstance(value, list) else value


def _revived(like: Any, plain: Any, num_experts: int) -> Any:
    """The value whose plain form is `plain`, of the kind of `like`; sets and dicts hold experts."""
    _check_numbers(plain)
    if isinstance(like, np.ndarray):
        return _array(like, plain)
    if isinstance(like, random.Random):
        draw = random.Random()
        version, words, gauss = plain
        draw.setstate((version, tuple(words), gauss))
        return draw
    if isinstance(like, set | dict):
        found = type(like)(plain)
        if not all(type(expert) is int and 0 <= expert < num_experts for expert in found):
            raise ValueError(f"an expert that is none of {num_experts}")
        if isinstance(found, dict) and any(isinstance(value, list) for value in found.values()):
            raise TypeError("a list, not a number")
        return found
    if isinstance(like, list):
        if len(plain) != len(like):
            raise ValueError(f"{len(plain)} values, not {len(like)}")
        for value, other in zip(like, plain, strict=True):
            _check_kind(value, other)
        return list(plain)
    if like is not None or plain is not None:
        _check_kind(like, plain)  # None may become a number
    return plain


def _check_kind(like: Any, plain: Any) -> None:
    """Whether a number may stand for another."""
    if (
        plain is None
        or isinstance(plain, list)
        or (isinstance(like, int) and isinstance(plain, float))
    ):
        raise TypeError(f"{plain!r:.40}, not a {'whole ' * isinstance(like, int)}number")


def _check_numbers(plain: Any) -> None:
    """Whether there are only numbers, and lists of them: no text, no NaN, none over 64 bits."""
    if isinstance(plain, list):
        for value in plain:
            _check_numbers(value)
    elif plain is not None and not (isinstance(plain, int | float) and abs(plain) < 2**63):
        raise TypeError(f"{plain!r:.40}, not a number")


def _array(like: np.ndarray[Any, Any], plain: Any) -> np.ndarray[Any, Any]:
    if not np.can_cast(np.array(plain).dtype, like.dtype, "same_kind"):
        raise TypeError(f"not all are {like.dtype}")
    with np.errstate(over="raise"):
        found = np.array(plain, like.dtype)
    if found.shape != like.shape:
        raise ValueError(f"shape {found.shape}, not {like.shape}")
    return found
