"""The vLLM plug-in's flags and options, without vLLM: a stand-in has what vLLM's arguments have."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hotexperts.config import DEFAULT_PACKING, DEFAULT_POLICY, Bytes
from hotexperts.errors import (
    ConfigError,
    HostMemoryError,
    UnsupportedModelError,
    UnsupportedOperationError,
)
from hotexperts.integrations.vllm import (
    budget,
    compat,
    flags,
    hooks,
    options,
    plugin,
    refusals,
)
from hotexperts.integrations.vllm.caches import ModelCaches
from hotexperts.sizing import LayerShape


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
    told = " ".join(parser.format_help().split())
    assert "--moe-expert-cache-size" in told
    assert f"packing (default {DEFAULT_PACKING})" in told
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
        (
            {"size": 4, "options": {"state": "a.npz", "trace": "./a.npz"}},
            "--moe-expert-cache-options: state and trace are both 'a.npz': give two",
        ),
        ({"size": 4, "options": "3"}, "--moe-expert-cache-options is 3: give a JSON object"),
        ({"size": 4, "options": {"speed": 1}}, r"\['speed'\]: known are prefill_tokens, self"),
        ({"size": 4, "options": {"self_test": "no"}}, "self_test is 'no': give true or false"),
        ({"size": 4, "options": {"state": 3}}, "state is 3: give the name of a file"),
        ({"size": 4, "options": {"state": "/"}}, "state is '/': give the name of a file"),
        ({"size": 4, "options": {"state": "/dev/null"}}, "state is '/dev/null': give the name of"),
        ({"size": 4, "options": {"prefill_tokens": 0}}, "prefill_tokens is 0: give at least 1"),
        ({"size": 4, "options": {"packing": "zip"}}, "^--moe-expert-cache-options: packing: exp"),
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
        ({"parallel_config": {"all2all_backend": "nixl_ep"}}, "nixl_ep.*use allgather"),
        (
            {
                "device_config": SimpleNamespace(device_type="cpu"),
                "compilation_config": SimpleNamespace(mode=3),
            },
            "torch.compile on a CPU does not work.*--enforce-eager",
        ),
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


def test_a_module_is_patched_though_it_was_looked_for_or_failed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probed_module.py").write_text("value = 1\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def patch(module: Any) -> None:
        module.value += 1

    plugin.after_import("probed_module", patch)
    assert importlib.util.find_spec("probed_module") is not None
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("probed_module")
    (tmp_path / "probed_module.py").write_text("value = 10\n")
    importlib.invalidate_caches()
    assert importlib.import_module("probed_module").value == 11
    assert not any(isinstance(finder, plugin._Finder) for finder in sys.meta_path)
    del sys.modules["probed_module"]


def test_a_module_that_was_missed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was half imported when the plug-in came is not imported again."""
    name = "vllm.v1.worker.worker_base"
    for known in plugin._PATCHES:
        monkeypatch.delitem(sys.modules, known, raising=False)
    plugin.check_patched()
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(UnsupportedModelError, match=r"too late for vllm\.v1\.worker.*register"):
        plugin.check_patched()
    vars(module)[plugin._DONE] = {plugin._PATCHES[name]}
    plugin.check_patched()


def test_a_model_without_a_single_cache_is_refused() -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=1)
    config = SimpleNamespace(
        additional_config={"hotexperts": {"size": 4}},
        model_config=SimpleNamespace(model="m"),
        parallel_config=parallel,
    )
    for found in ([], [SimpleNamespace(layers={})]):
        with pytest.raises(UnsupportedModelError, match="m has its experts in layers that vLLM"):
            hooks.check_cached(config, found)
    hooks.check_cached(config, [SimpleNamespace(layers={"l0": 1})])
    parallel.pipeline_parallel_size = 2
    hooks.check_cached(config, [])
    config.additional_config, parallel.pipeline_parallel_size = {}, 1
    hooks.check_cached(config, [])


def test_a_method_of_two_layers_is_held_once() -> None:
    calls: list[str] = []
    caches = SimpleNamespace(
        num_expected=0,
        created=lambda layer: calls.append(f"created {layer}"),
        process=lambda layer, method, process: calls.append(f"processed {layer}"),
    )
    method = SimpleNamespace(
        create_weights=lambda layer: calls.append(f"create {layer}"),
        process_weights_after_loading=lambda layer: None,
    )
    for layer in ("a", "b"):
        hooks._cached(method, caches)
        method.create_weights(layer)
    for layer in ("a", "b"):
        method.process_weights_after_loading(layer)
    assert caches.num_expected == 2
    assert calls == ["create a", "created a", "create b", "created b", "processed a", "processed b"]


def test_experts_beyond_the_host_are_refused_before_they_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget, "available_host_bytes", lambda: 100)
    need = budget.HostBudget(num_ranks=2)
    need.add(20)
    need.add(30)
    with pytest.raises(HostMemoryError, match=r"more than 102 B.*check_host_memory.: false"):
        need.add(1)


def test_what_is_not_for_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 10 GiB: the user's budget or vLLM's share; KV as given, or for four sequences."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    properties = SimpleNamespace(total_memory=10 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 << 30)
    model = SimpleNamespace(
        max_model_len=1000,
        dtype=torch.bfloat16,
        get_num_kv_heads=lambda parallel: 4,
        get_head_size=lambda: 128,
        get_num_layers=lambda parallel: 48,
        get_vocab_size=lambda: 1000,
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=None,
        cache_config=SimpleNamespace(gpu_memory_utilization=0.5, kv_cache_memory_bytes=None),
        scheduler_config=SimpleNamespace(max_num_seqs=9, max_num_batched_tokens=100),
    )
    assert budget.total_nbytes("auto", config, gpu) == 5 << 30
    assert budget.total_nbytes(Bytes(7), config, gpu) == 7
    with pytest.raises(ConfigError, match="need a GPU: give --moe-expert-cache-size N"):
        budget.total_nbytes("auto", config, cpu)
    assert budget.kv_nbytes(config) == 2 * 4000 * 4 * 128 * 48 * 2
    layer = SimpleNamespace(hidden_size=64, intermediate_size_per_partition=48, top_k=2)
    rows, tokens, logits = 4 * 100 * 2 * 96 * 2, 8 * 100 * 64 * 2, 4 * 9 * 1000 * 4
    assert budget.workspace_nbytes(config, layer) == rows + tokens + logits
    config.cache_config.kv_cache_memory_bytes = 1 << 20
    other = budget.other_nbytes(config, gpu, layer, experts_nbytes=2 << 30)
    expected = (3 << 30) + (1 << 20) + rows + tokens + logits + budget.CONTEXT_NBYTES
    assert other == expected


def test_a_budget_holds_what_prefetches_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, and of each pair of layers its table, or a gate's copy where that is larger."""
    shapes = [LayerShape(16, 4, 1024)] * 3
    table = 4 * (17 * 17 + 18 * 16)
    for how, hidden_size, expected in (
        ("off", 64, 0),
        ("lift", 64, 2048 + 2 * table),
        ("router", 64, 2048 + 2 * 4 * 16 * 64),
        ("router", 8, 2048 + 2 * table),
    ):
        assert budget.prefetch_nbytes(how, shapes, hidden_size) == expected
    monkeypatch.setattr(budget, "total_nbytes", lambda *args: 51_000)
    monkeypatch.setattr(budget, "other_nbytes", lambda *args: 500)
    monkeypatch.setattr(budget, "largest_of_ranks", lambda value: value)
    layer = SimpleNamespace(hidden_size=64, top_k=4)
    tensors = {"w2_weight": torch.zeros(16, 250)}  # rows of 1024 bytes
    capacities = []
    for how in ("off", "lift", "router"):
        wanted = options.parse({"size": "auto", "options": {"prefetch": how}})
        caches = ModelCaches(wanted, config=None)
        caches.num_expected = 3
        here = torch.zeros(16, 250, device="meta")
        capacities.append(caches._make_plan(layer, tensors, here).capacity)
    # 47,950, less 6664, less 10,240; with banks 14 slots are 47,104, 8 are 40,960, 7 are 35,840
    assert capacities == [14, 8, 7]


def draft_config(folder: Path, method: str = "eagle3", num_experts: int = 0) -> SimpleNamespace:
    """What is read of a `VllmConfig` with a draft model: 2 layers of 3 heads of 8, on two ranks."""
    draft = SimpleNamespace(
        model=str(folder),
        get_num_experts=lambda: num_experts,
        get_num_kv_heads=lambda parallel: 3,
        get_head_size=lambda: 8,
        get_num_layers=lambda parallel: 2,
    )
    speculation = SimpleNamespace(
        method=method,
        draft_model_config=draft,
        draft_parallel_config=SimpleNamespace(tensor_parallel_size=2),
    )
    return engine_config(
        speculative_config=speculation,
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        model_config={"max_model_len": 100, "dtype": torch.bfloat16},
    )


def test_a_draft_model_is_reckoned_with(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    (tmp_path / "b.safetensors").write_bytes(bytes(500))
    config = draft_config(tmp_path)
    assert budget.draft_nbytes(config) == 750 + 2 * 200 * 24 * 2 * 2
    config.cache_config.kv_cache_memory_bytes = 1 << 20  # for both models
    assert budget.draft_nbytes(config) == 750
    assert budget.draft_nbytes(draft_config(tmp_path, "ngram")) == 0
    assert budget.draft_nbytes(engine_config()) == 0


@pytest.mark.parametrize(
    ("method", "num_experts", "has_file"),
    [("mtp", 0, True), ("eagle3", 8, True), ("draft_model", 0, False)],
)
def test_a_budget_beside_an_unknown_draft_model_is_refused(
    method: str,
    num_experts: int,
    has_file: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a number of slots it may be what it likes."""
    monkeypatch.setattr(refusals, "check_version", lambda: None)
    if has_file:
        (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    config = draft_config(tmp_path, method, num_experts)
    refusals.check_engine(config, options.parse({"size": 4}))
    for given in ({"size": "auto"}, {"gib": 4}):
        with pytest.raises(ConfigError, match=rf"draft model .*\({method}\).*cache-size N"):
            refusals.check_engine(config, options.parse(given))


def test_each_rank_of_each_replica_has_its_own_state() -> None:
    from hotexperts.integrations.vllm.state_file import state_path

    parallel = SimpleNamespace(data_parallel_size=1, data_parallel_rank=0, world_size=1)
    assert state_path(None, parallel, 0) is None
    assert state_path("/tmp/s", parallel, 0) == Path("/tmp/s")
    parallel.world_size = 2
    assert state_path("/tmp/s", parallel, 1) == Path("/tmp/s.rank1")
    parallel.data_parallel_size, parallel.data_parallel_rank = 2, 1
    assert state_path("/tmp/s", parallel, 0) == Path("/tmp/s.dp1.rank0")


def test_a_state_that_cannot_be_saved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "check_version", lambda: None)
    wanted = options.parse({"size": 4, "options": {"state": "/no/folder/state"}})
    with pytest.raises(ConfigError, match="/no/folder/state', in a folder that is not there"):
        refusals.check_engine(engine_config(), wanted)
    wanted = options.parse({"size": 4, "options": {"state": "/tmp/state"}})
    config = engine_config(parallel_config={"distributed_executor_backend": "ray"})
    with pytest.raises(UnsupportedOperationError, match="does not work with Ray"):
        refusals.check_engine(config, wanted)
