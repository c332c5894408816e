"""The user's choices, as they travel through vLLM's `additional_config` to every process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotexperts.config import (
    DEFAULT_PACKING,
    DEFAULT_POLICY,
    Bytes,
    CacheConfig,
    CacheSize,
    parse_cache_size,
)
from hotexperts.errors import ConfigError
from hotexperts.policy import POLICIES

KEY = "hotexperts"  # in additional_config
NAMES = ("size", "gib", "policy", "options")
MORE_OPTIONS = (
    "prefill_tokens",
    "self_test",
    "state",
    "check_host_memory",
    "check_ranks",
    "trace",
    "packing",
    "prefetch",
)
DEFAULT_PREFILL_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ExpertCacheOptions:
    """What was asked for, checked.

    Attributes:
        cache: size, policy, packing and prefetch; the mode follows from the device.
        prefill_tokens: calls of more tokens are prefills: they evict nobody.
        self_test: whether each layer is run over all experts and over its cache as it loads; None:
            where its weights are quantised.
        state: a file to start warm from, if it is there, and to save to at the end; each rank of
            several has its own, with `.rankN` at the end.
        check_host_memory: refuse before loading what the host's memory does not hold.
        check_ranks: after each step, whether all tensor-parallel ranks decided alike.
        trace: an `.npz` file for the routing of all steps; each rank of several has its own, with
            `.rankN` before the ending.
    """

    cache: CacheConfig
    prefill_tokens: int = DEFAULT_PREFILL_TOKENS
    self_test: bool | None = None
    state: str | None = None
    check_host_memory: bool = True
    check_ranks: bool = False
    trace: str | None = None


def flag(name: str) -> str:
    """An option's name on the command line."""
    return f"--moe-expert-cache-{name}"


def keyword(name: str) -> str:
    """An option's name as a keyword argument of `LLM` and `EngineArgs`."""
    return f"moe_expert_cache_{name}"


def from_additional_config(additional: Any) -> ExpertCacheOptions | None:
    """The options in a finished configuration; None where no cache was asked for.

    Raises:
        ConfigError: one that cannot take effect; the message names its flag.
    """
    given = additional.get(KEY) if isinstance(additional, Mapping) else None
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"additional_config[{KEY!r}] is {given!r:.80}: give an object with {', '.join(NAMES)}"
        )
    return parse(given)


def parse(given: Mapping[str, Any]) -> ExpertCacheOptions:
    """Check the options.

    Args:
        given: by the names of `NAMES`, those that were given.

    Raises:
        ConfigError: one that cannot take effect; the message names its flag.
    """
    unknown = sorted(set(given) - set(NAMES), key=str)
    if unknown:
        raise ConfigError(f"additional_config[{KEY!r}] has {unknown}: use {', '.join(NAMES)}")
    more = _parse_more(given.get("options"))
    prefill_tokens = more.get("prefill_tokens", DEFAULT_PREFILL_TOKENS)
    if type(prefill_tokens) is not int or prefill_tokens < 1:
        raise ConfigError(
            f"{flag('options')}: prefill_tokens is {prefill_tokens!r}: give at least 1 token"
        )
    policy = given.get("policy") or DEFAULT_POLICY
    try:
        POLICIES.load(policy)
        packing = more.get("packing", DEFAULT_PACKING)
        prefetch = more.get("prefetch", "off")
        cache = CacheConfig(_parse_size(given), policy, "ram", packing=packing, prefetch=prefetch)
    except ConfigError as error:
        raise ConfigError(f"{_blame(str(error))}: {error}") from error
    state, trace = _parse_file(more, "state"), _parse_file(more, "trace")
    if state is not None and trace is not None and Path(state).resolve() == Path(trace).resolve():
        raise ConfigError(
            f"{flag('options')}: state and trace are both {state!r}: give two names of files"
        )
    return ExpertCacheOptions(
        cache,
        prefill_tokens,
        self_test=_parse_bool(more, "self_test"),
        state=state,
        check_host_memory=_parse_bool(more, "check_host_memory") is not False,
        check_ranks=bool(_parse_bool(more, "check_ranks")),
        trace=trace,
    )


def _parse_bool(given: Mapping[str, Any], name: str) -> bool | None:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{flag('options')}: {name} is {value!r}: give true or false")
    return value


def _parse_file(given: Mapping[str, Any], name: str) -> str | None:
    path = given.get(name)
    if path is None:
        return None
    try:
        is_name = isinstance(path, str) and path != ""
        is_file = is_name and (Path(path).is_file() or not Path(path).exists())
    except (OSError, ValueError):  # no name that the system could have
        is_file = False
    if not is_file:
        raise ConfigError(f"{flag('options')}: {name} is {path!r:.80}: give the name of a file")
    return str(path)


def _parse_size(given: Mapping[str, Any]) -> CacheSize:
    size, gib = given.get("size"), given.get("gib")
    if (size is None) == (gib is None):
        raise ConfigError(f"give one of {flag('size')} N|auto and {flag('gib')} G")
    if size is not None:
        parsed = parse_cache_size(size)
        if isinstance(parsed, Bytes):
            raise ConfigError(f"the size is {size!r}: give a number of slots, or use {flag('gib')}")
        return parsed
    try:
        num_bytes = int(float(str(gib)) * 2**30)
    except (TypeError, ValueError, OverflowError):
        num_bytes = 0
    if num_bytes < 1:
        raise ConfigError(f"a budget of {gib!r} GiB: give a number above 0")
    return Bytes(num_bytes)


def _parse_more(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{flag('options')} is no JSON ({error}): {given[:80]}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{flag('options')} is {given!r}: give a JSON object")
    unknown = sorted(set(given) - set(MORE_OPTIONS), key=str)
    if unknown:
        raise ConfigError(f"{flag('options')} has {unknown}: known are {', '.join(MORE_OPTIONS)}")
    return given


def _blame(message: str) -> str:
    """The flag to turn, by what the message is about."""
    if "packing" in message:
        return f"{flag('options')}: packing"
    if "prefetch" in message:
        return f"{flag('options')}: prefetch"
    return flag("policy") if "policy" in message else flag("size")
