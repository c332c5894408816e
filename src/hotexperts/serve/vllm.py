"""The command line of `vllm serve` that does what `hotexperts serve` was asked for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from hotexperts.config import DEFAULT_PACKING, Bytes, CacheSize, ExpertPacking, Prefetch
from hotexperts.errors import ConfigError
from hotexperts.integrations.vllm.options import flag

Flags: TypeAlias = dict[str, "str | bool | None"]
MODULE = "vllm.entrypoints.cli.main"  # what the script `vllm` calls


def cache_flags(size: CacheSize, policy: str, more: dict[str, Any]) -> Flags:
    """The plug-in's flags.

    Args:
        size: slots a layer, a budget, or "auto".
        policy: which expert leaves.
        more: from `more_options`.
    """
    return {
        flag("size"): None if isinstance(size, Bytes) else str(size),
        flag("gib"): f"{size.num_bytes / 2**30:.15g}" if isinstance(size, Bytes) else None,
        flag("policy"): policy,
        flag("options"): json.dumps(more) if more else None,
    }


def more_options(
    state: Path | None, packing: ExpertPacking, prefetch: Prefetch, *, check_host_memory: bool
) -> dict[str, Any]:
    """What has no flag of its own; only what differs from the plug-in's defaults."""
    return {
        **({} if state is None else {"state": str(state)}),
        **({} if packing == DEFAULT_PACKING else {"packing": packing}),
        **({} if prefetch == "off" else {"prefetch": prefetch}),
        **({} if check_host_memory else {"check_host_memory": False}),
    }


def arguments(model: str, flags: Flags, passed: Sequence[str]) -> list[str]:
    """The arguments of `vllm`.

    Args:
        model: folder or hub id.
        flags: True is a flag alone, None and False are left out.
        passed: what the user gives to vLLM itself.

    Raises:
        ConfigError: a flag is given in both ways.
    """
    found = ["serve", model]
    for name, value in flags.items():
        if value is not None and value is not False:
            found += [name] if value is True else [name, value]
    given = {name.partition("=")[0].replace("_", "-") for name in passed}
    twice = sorted(given.intersection({*flags, "--api-key"}))
    if twice:
        raise ConfigError(
            f"{', '.join(twice)} after '--': hotexperts gives that to vLLM itself: use its own "
            "option before the '--'"
        )
    return [*found, *passed]


def run(arguments: Sequence[str], api_key: str | None) -> NoReturn:
    """Become vLLM's server.

    Args:
        arguments: of `vllm`.
        api_key: passed on where no list of processes shows it.
    """
    environment = dict(os.environ)
    if api_key is not None:
        environment["VLLM_API_KEY"] = api_key
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", MODULE, *arguments]
    os.execve(sys.executable, command, environment)
