"""What a served model leaves however it ends, without vLLM: its classes are stand-ins."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hotexperts.cache import CachedWeightProvider, CPUBackingStore
from hotexperts.errors import ConfigError
from hotexperts.integrations.vllm import ending, hooks, options, state_file

CPU = torch.device("cpu")
LAYER = "l0.mlp.experts"


def caches(state: Path) -> Any:
    """Of one layer, started."""
    store = CPUBackingStore.from_tensors({"w13_weight": torch.randn(8, 4, 4)}, pin=False)
    provider = CachedWeightProvider(store, 3, policy="lru", device="cpu")
    provider.slot_buffer.zero_()
    parallel = SimpleNamespace(data_parallel_size=1, world_size=1, enable_expert_parallel=False)
    return SimpleNamespace(
        options=options.parse({"size": 3, "policy": "lru", "options": {"state": str(state)}}),
        config=SimpleNamespace(parallel_config=parallel),
        providers={LAYER: provider},
        capacity=3,
        rank=0,
        digest=None,
        has_started=True,
        is_in_step=False,
        num_steps=0,
        recorder=None,
    )


def layers_of(seed: int) -> nn.Module:
    """A model whose one MoE layer has a gate, and experts that are elsewhere."""
    torch.manual_seed(seed)
    block = nn.ModuleDict({"gate": nn.Linear(4, 8), "experts": nn.Identity()})
    return nn.ModuleDict({"l0": nn.ModuleDict({"mlp": block})})


def ask(made: Any, *ids: int) -> None:
    made.providers[LAYER].prepare(torch.tensor([ids], dtype=torch.int32))


def residents(path: Path) -> set[int]:
    state = json.loads(path.read_text())["layers"][LAYER]["state"]
    return {expert for expert, slot in enumerate(state["slot_of"]) if slot >= 0}


def test_the_state_is_saved_often_at_first_and_then_every_1024_steps() -> None:
    due = [num for num in range(1, 4097) if ending.is_due(num)]
    assert due == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]


def test_a_process_that_is_killed_leaves_its_last_save(tmp_path: Path) -> None:
    path = tmp_path / "state"
    made = caches(path)
    made.has_started = False
    state_file.save_now_and_then(made)
    assert not path.exists(), "warm-up is no step"
    made.has_started = True
    seen = []
    for expert in range(5):
        ask(made, expert)
        state_file.save_now_and_then(made)
        seen.append(max(residents(path)))
    assert seen == [0, 1, 1, 3, 3]  # after steps 1, 2 and 4


def test_a_disk_that_is_full_does_not_stop_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise ConfigError("no room")

    made = caches(tmp_path / "state")
    monkeypatch.setattr(state_file.warm_start, "save", full)
    state_file.save_now_and_then(made)
    ending.save_all([made])
    assert [record.message for record in caplog.records] == [
        "expert cache: no room; trying again later",
        "expert cache: the state could not be saved",
    ]


def test_an_end_saves_what_is_whole(tmp_path: Path) -> None:
    """Not a step that was broken off; and an end that comes twice saves once."""
    path = tmp_path / "state"
    made, ended = caches(path), []
    made.recorder = SimpleNamespace(end=lambda: ended.append(1))
    ask(made, 1)
    made.is_in_step = True
    ending.save_all([made])
    assert not path.exists()
    assert ended == [1]
    made = caches(path)
    ask(made, 1)
    ending.save_all([made])
    assert residents(path) == {1}
    ask(made, 2)
    ending.save_all([made])
    assert residents(path) == {1}


def test_a_trace_that_cannot_end_hides_no_other_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a GPU's fault, of which whoever reads the log must still be told."""

    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    first, other = caches(tmp_path / "a"), caches(tmp_path / "b")
    first.recorder = SimpleNamespace(end=fail)
    ask(other, 2)
    ending.save_all([first, other])
    assert residents(tmp_path / "b") == {2}
    assert [r.message for r in caplog.records] == [
        "expert cache: the end of the trace could not be saved"
    ]


def test_an_engine_saves_as_its_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before vLLM takes its signal handlers away; `SystemExit` ends the loop."""
    order: list[Any] = []

    class EngineCoreProc:
        def run_busy_loop(self) -> None:
            order.append("loop")
            raise SystemExit

    class DPEngineCoreProc(EngineCoreProc):
        def run_busy_loop(self) -> None:
            order.append("data parallel loop")

    module = SimpleNamespace(EngineCoreProc=EngineCoreProc, DPEngineCoreProc=DPEngineCoreProc)
    monkeypatch.setattr(ending, "save_all", order.append)
    monkeypatch.setattr(hooks, "models", lambda: "models")
    ending.patch_loops(module)
    with pytest.raises(SystemExit):
        EngineCoreProc().run_busy_loop()
    DPEngineCoreProc().run_busy_loop()
    assert order == ["loop", "models", "data parallel loop", "models"]


@pytest.mark.parametrize(
    ("given", "is_wanted", "expected"),
    [
        (0, False, 0),
        (None, False, None),
        (0, True, ending.GRACE_SECONDS),
        (None, True, ending.GRACE_SECONDS),
        (120.0, True, 120.0),
    ],
)
def test_engines_have_time_to_save_where_there_is_something(
    given: Any, is_wanted: bool, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class CoreEngineProcManager:
        def shutdown(self, timeout: float | None = None) -> None:
            seen.append(timeout)

    monkeypatch.setattr(ending, "_is_wanted", False)
    ending.patch_processes(SimpleNamespace(CoreEngineProcManager=CoreEngineProcManager))
    if is_wanted:
        ending.wait_for_engines()
    CoreEngineProcManager().shutdown(timeout=given)
    assert seen == [expected]


@pytest.mark.parametrize("is_alike", [True, False])
def test_ranks_start_warm_together_or_not_at_all(
    is_alike: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "state"
    monkeypatch.setattr(state_file, "same_on_all_ranks", lambda providers: is_alike)
    made, model = caches(path), layers_of(0)
    state_file.start_warm(made, 0, model)
    ask(made, 1)
    state_file.save_state(made)
    again = caches(path)
    state_file.start_warm(again, 0, model)
    ask(again, 1)
    assert again.providers[LAYER].stats.hits == is_alike
    said = f"warm from {path}" if is_alike else f"starting empty, for {path} is not of the other"
    assert said in caplog.records[-1].message


@pytest.mark.parametrize("named", [True, False])
def test_a_state_of_another_model_of_the_same_shape_starts_empty(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where layers have other names than the model's modules."""
    monkeypatch.setattr(state_file, "same_on_all_ranks", lambda providers: True)
    path = tmp_path / "state"
    models = [layers_of(seed) if named else nn.Sequential(layers_of(seed)) for seed in (0, 1)]
    made = caches(path)
    state_file.start_warm(made, 0, models[0])
    ask(made, 1)
    state_file.save_state(made)
    for model, hits in ((models[0], 1), (models[1], 0)):
        again = caches(path)
        state_file.start_warm(again, 0, model)
        ask(again, 1)
        assert again.providers[LAYER].stats.hits == hits
    assert "is of another model with the same shapes" in caplog.text
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "model": None}))  # as it was written before
    again = caches(path)
    state_file.start_warm(again, 0, models[0])
    ask(again, 1)
    assert again.providers[LAYER].stats.hits == 0
    assert "does not say which model it is of" in caplog.records[-1].message


def test_a_pipe_in_place_of_a_rank_s_state_stops_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "state.rank0")
    made = caches(tmp_path / "state")
    made.config.parallel_config.world_size = 2
    with pytest.raises(ConfigError, match="rank0: a pipe is there: name a file for the cache's"):
        state_file.start_warm(made, 0, layers_of(0))
