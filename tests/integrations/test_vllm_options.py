"""The vLLM plug-in's flags and options, without vLLM: a stand-in has what vLLM's arguments have."""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotexperts.config import DEFAULT_POLICY, Bytes
from hotexperts.errors import ConfigError, UnsupportedModelError, UnsupportedOperationError
from hotexperts.integrations.vllm import compat, flags, options, plugin, refusals


@dataclass
class EngineArgs:
    model: str = "m"
    additional_config: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--model", default="m")
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        return cls(model=args.model)

    def create_engine_config(self, usage_context: Any = None) -> SimpleNamespace:
        return engine_config(additional_config=self.additional_config)


def engine_config(**changes: Any) -> SimpleNamespace:
    """What `check_engine` reads of a `VllmConfig`, nothing unusual in it."""
    uva = SimpleNamespace(cpu_offload_gb=0, cpu_offload_params=set())
    parallel = {
        "enable_expert_parallel": False,
        "tensor_parallel_size": 2,
        "data_parallel_size": 1,
        "enable_eplb": False,
        "use_ubatching": False,
        "all2all_backend": "allgather_reducescatter",
    }
    parts: dict[str, Any] = {
        "model_config": {"model": "m", "get_num_experts": lambda: 16, "enable_sleep_mode": False},
        "parallel_config": parallel,
        "offload_config": {"uva": uva, "prefetch": SimpleNamespace(offload_group_size=0)},
    }
    for name, values in parts.items():
        values.update(changes.pop(name, {}))
    config = {name: SimpleNamespace(**values) for name, values in parts.items()}
    return SimpleNamespace(
        **{"lora_config": None, "additional_config": {}, "instance_id": "i"} | config | changes
    )


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A patched stand-in of `vllm.engine.arg_utils`."""
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.26.0")
    plain = dataclass(type("EngineArgs", (EngineArgs,), {}))
    plain.add_cli_args = staticmethod(EngineArgs.add_cli_args)
    asynchronous = dataclass(type("AsyncEngineArgs", (plain,), {"__annotations__": {}}))
    module = SimpleNamespace(EngineArgs=plain, AsyncEngineArgs=asynchronous)
    flags.patch(module)
    return module


def test_flags_reach_the_configuration(args: Any) -> None:
    parser = args.EngineArgs.add_cli_args(argparse.ArgumentParser())
    assert "--moe-expert-cache-size" in parser.format_help()
    given = ["--moe-expert-cache-size", "6", "--moe-expert-cache-policy", "lru"]
    made = args.AsyncEngineArgs.from_cli_args(parser.parse_args(given))
    assert type(made) is args.AsyncEngineArgs
    assert made.additional_config == {"hotexperts": {"size": "6", "policy": "lru"}}
    wanted = options.from_additional_config(made.create_engine_config().additional_config)
    assert wanted is not None
    assert (wanted.cache.size, wanted.cache.policy) == (6, "lru")


def test_keywords_reach_the_configuration(args: Any) -> None:
    made = args.EngineArgs(
        model="x", moe_expert_cache_gib=1.5, moe_expert_cache_options={"prefill_tokens": 9}
    )
    wanted = options.from_additional_config(made.additional_config)
    assert wanted is not None
    assert wanted.cache.size == Bytes(3 * 2**29)
    assert (wanted.cache.policy, wanted.prefill_tokens) == (DEFAULT_POLICY, 9)


def test_without_a_flag_nothing_changes(args: Any) -> None:
    parser = args.EngineArgs.add_cli_args(argparse.ArgumentParser())
    for made in (args.EngineArgs(), args.EngineArgs.from_cli_args(parser.parse_args([]))):
        assert made.additional_config == {}
        assert options.from_additional_config(made.additional_config) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "--moe-expert-cache-size: .*at least 1 slot"),
        ({"size": "-4"}, "--moe-expert-cache-size: .*at least 1 slot"),
        ({"size": "6GiB"}, "give a number of slots, or use --moe-expert-cache-gib"),
        ({"size": 4, "gib": 2}, "give one of --moe-expert-cache-size N|auto and"),
        ({"policy": "lru"}, "give one of --moe-expert-cache-size"),
        ({"gib": "much"}, "'much' GiB: give a number above 0"),
        ({"gib": 0}, "0 GiB: give a number above 0"),
        ({"size": 4, "policy": "best"}, "--moe-expert-cache-policy: .*best.*lru"),
        ({"size": 4, "options": "{"}, "--moe-expert-cache-options is no JSON"),
        ({"size": 4, "options": "3"}, "--moe-expert-cache-options is 3: give a JSON object"),
        ({"size": 4, "options": {"speed": 1}}, r"\['speed'\]: known are prefill_tokens, self"),
        ({"size": 4, "options": {"self_test": "no"}}, "self_test is 'no': give true or false"),
        ({"size": 4, "options": {"prefill_tokens": 0}}, "prefill_tokens is 0: give at least 1"),
        ({"slots": 4}, r"\['slots'\]: use size, gib, policy, options"),
    ],
    ids=str,
)
def test_what_cannot_take_effect_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.parse(given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_config": {"get_num_experts": lambda: 0}}, "m is not a Mixture-of-Experts model"),
        ({"model_config": {"get_num_experts": lambda: 4}}, "size 6: a layer has only 4 experts"),
        (
            {"parallel_config": {"enable_expert_parallel": True, "tensor_parallel_size": 4}},
            "only 4",
        ),
        ({"parallel_config": {"enable_eplb": True}}, "--enable-eplb does not work with"),
        ({"parallel_config": {"use_ubatching": True}}, "--enable-dbo"),
        ({"parallel_config": {"enable_elastic_ep": True}}, "--enable-elastic-ep"),
        ({"parallel_config": {"all2all_backend": "deepep_low_latency"}}, "deepep_low_latency"),
        ({"lora_config": object()}, "--enable-lora"),
        ({"model_config": {"enable_sleep_mode": True}}, "--enable-sleep-mode"),
        (
            {"offload_config": {"prefetch": SimpleNamespace(offload_group_size=2)}},
            "--offload-group",
        ),
        (
            {
                "offload_config": {
                    "uva": SimpleNamespace(cpu_offload_gb=4, cpu_offload_params=set())
                }
            },
            "--cpu-offload-gb",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_cache_does_not_work_with_is_refused(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.26.0")
    wanted = options.parse({"size": 6})
    refusals.check_engine(engine_config(), wanted)
    refused = (ConfigError, UnsupportedModelError, UnsupportedOperationError)
    with pytest.raises(refused, match=message):
        refusals.check_engine(engine_config(**changes), wanted)


def test_an_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.1")
    with pytest.raises(UnsupportedModelError, match=r"vLLM 0\.99\.1 is not supported.*0\.26"):
        compat.check_version()


def test_a_module_is_patched_once_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    def patch(module: Any) -> None:
        module.value += 1

    plugin.after_import("late_module", patch)
    plugin.after_import("late_module", patch)
    module = importlib.import_module("late_module")
    plugin.after_import("late_module", patch)
    assert module.value == 2
    assert not any(isinstance(finder, plugin._Finder) for finder in sys.meta_path)
    del sys.modules["late_module"]
