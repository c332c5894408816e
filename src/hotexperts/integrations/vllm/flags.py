"""The command line's flags and `LLM`'s keyword arguments, carried in `additional_config`."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from hotexperts.integrations.vllm import ending, options, prometheus
from hotexperts.integrations.vllm.options import KEY, NAMES, flag, keyword

_HELP = {
    "size": "experts a layer keeps on the GPU, or 'auto' for as many as fit; the others stay in "
    "host memory and are copied when a token needs them",
    "gib": "the same as a budget in GiB for weights, KV cache and expert slots together",
    "policy": "which expert leaves (default: adv)",
    "options": "further options as JSON: prefill_tokens (default 64), from which on a call is a "
    "prefill, which evicts no expert; self_test (default: for quantised weights), whether each "
    "layer is compared with itself uncached as it loads; state, a file to start warm from and to "
    "save to; check_host_memory (default true), whether to refuse what the host cannot hold; "
    "trace, an .npz file for the routing of all steps; check_ranks (default false), whether to "
    "stop where tensor-parallel ranks decide differently; packing (default auto), whether bf16 "
    "experts are kept in 12 bits a value in host memory: auto, none or packed12; prefetch (default "
    "off), router or lift to fetch before a layer asks",
}


def patch(arg_utils: Any) -> None:
    """Teach vLLM's engine arguments ours; without one of them nothing changes."""
    plain, asynchronous = arg_utils.EngineArgs, arg_utils.AsyncEngineArgs
    plain.add_cli_args = staticmethod(_with_flags(plain.add_cli_args))
    plain.from_cli_args = classmethod(_with_values(plain.from_cli_args.__func__))
    for cls in (plain, asynchronous):  # each dataclass has an __init__ of its own
        cls.__init__ = _with_keywords(cls.__init__)
    plain.create_engine_config = _checked(plain.create_engine_config)


def _with_flags(add: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add)
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add(parser)
        group = parser.add_argument_group("hotexperts", "MoE experts beyond the GPU's memory")
        for name in NAMES:
            group.add_argument(flag(name), default=None, help=_HELP[name])
        return parser

    return add_cli_args


def _with_values(from_args: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(from_args)
    def from_cli_args(cls: Any, args: argparse.Namespace) -> Any:
        engine_args = from_args(cls, args)
        _merge(engine_args, {name: getattr(args, keyword(name), None) for name in NAMES})
        return engine_args

    return from_cli_args


def _with_keywords(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        ours = {name: kwargs.pop(keyword(name), None) for name in NAMES}
        init(self, *args, **kwargs)
        _merge(self, ours)

    return __init__


def _merge(engine_args: Any, given: dict[str, Any]) -> None:
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return
    additional = dict(engine_args.additional_config or {})
    additional[KEY] = dict(additional.get(KEY) or {}) | given
    options.parse(additional[KEY])  # before anything is built
    engine_args.additional_config = additional


def _checked(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        wanted = options.from_additional_config(config.additional_config)
        if wanted is not None:
            from hotexperts.integrations.vllm.refusals import check_engine

            check_engine(config, wanted)
            prometheus.watch(config.instance_id)
            if wanted.state or wanted.trace:
                ending.wait_for_engines()
        return config

    return create_engine_config
