"""The recorder of a served model's routing, without vLLM: steps and runners are stand-ins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hotexperts.errors import ConfigError, UnsupportedModelError, UnsupportedOperationError
from hotexperts.integrations.vllm import options, refusals
from hotexperts.integrations.vllm.trace import Recorder, row_order, trace_path
from hotexperts.simulate import read_trace
from hotexperts.simulate.trace import TraceError

CPU = torch.device("cpu")
CONFIG = SimpleNamespace(model_config=SimpleNamespace(model="m"))


def layer(number: int, top_k: int = 2) -> Any:
    return SimpleNamespace(layer_name=f"l{number}", top_k=top_k, global_num_experts=300)


def step(new: dict[str, Any], going: dict[str, int], tokens: dict[str, int], done: Any = ()) -> Any:
    """A `SchedulerOutput`: new requests with prompt and computed tokens, others with the latter."""
    return SimpleNamespace(
        finished_req_ids=set(done),
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=name, prompt_token_ids=prompt, prompt_embeds=embeds, num_computed_tokens=n
            )
            for name, (prompt, embeds, n) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(going), num_computed_tokens=list(going.values())
        ),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
    )


def runner(*names: str) -> Any:
    return SimpleNamespace(input_batch=SimpleNamespace(req_ids=list(names)))


def recorder(path: Path) -> tuple[Recorder, list[torch.Tensor]]:
    made = Recorder(path, 2, 8, CONFIG)
    return made, [made.rows_of(layer(i), 100, CPU) for i in range(2)]


def test_steps_become_tokens(tmp_path: Path) -> None:
    """A prompt in two parts, another one given as embeddings, a preempted request; rows of a
    step in the runner's order, and what is beyond them left out."""
    path = tmp_path / "r.npz"
    made, rows = recorder(path)
    steps = [
        (step({"a": ([7, 7, 7], None, 0)}, {}, {"a": 2}), runner("a")),
        (
            step({"b": (None, torch.zeros(1, 4), 0)}, {"a": 2}, {"a": 1, "b": 1}),
            runner("b", "a"),
        ),
        (step({}, {"a": 3, "b": 1}, {"a": 1, "b": 1}), runner("a", "b")),
        (step({"a": ([7, 7, 7], None, 2)}, {}, {"a": 3}, done=["b"]), runner("a")),
        (step({}, {}, {}), runner()),
        (step({"b": ([1], None, 0)}, {}, {"b": 1}, done=["a"]), runner("b")),
    ]
    first_id = 0
    for scheduled, ran in steps:
        for number, buffer in enumerate(rows):
            ids = torch.arange(16, dtype=torch.int32).view(8, 2) + first_id + 128 * number
            buffer.copy_(ids)
        made.after_step(scheduled, ran)
        first_id += 2 * scheduled.total_num_scheduled_tokens
    assert made.end() == str(path)
    trace = read_trace(path)
    assert trace.seq.tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 2]
    assert trace.phase.tolist() == [0, 0, 0, 0, 1, 1, 0, 1, 1, 0]
    expected = torch.arange(20).view(10, 1, 2) + torch.tensor([0, 128]).view(1, 2, 1)
    assert trace.ids.tolist() == expected.tolist()
    assert trace.meta == {
        "model": "m",
        "source": "vLLM",
        "layers": ["l0", "l1"],
        "expert_nbytes": 100,
        "n_experts": 300,
        "k": 2,
    }
    made.after_step(*steps[0])
    assert made.end() == str(path)
    assert len(read_trace(path).ids) == 10


def test_a_process_that_is_killed_leaves_what_it_wrote_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the first step, and then twice a minute, or more rarely where writing takes long."""
    from hotexperts.integrations.vllm import trace

    now = 100.0
    seconds = 0.0
    save = trace.TraceWriter.save

    def take_long(writer: Any) -> None:
        nonlocal now
        save(writer)
        now += seconds

    monkeypatch.setattr(trace, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(trace.TraceWriter, "save", take_long)
    made, rows = recorder(tmp_path / "r.npz")
    for buffer in rows:
        buffer.copy_(torch.tensor([3, 5]).expand(8, 2))

    def num_left_at(second: float, position: int) -> int:
        nonlocal now
        now = second
        new = {"a": ([7], None, 0)} if position == 0 else {}
        going = {"a": position} if position else {}
        made.after_step(step(new, going, {"a": 1}), runner("a"))
        assert made._saving is not None
        made._saving.join()
        return len(read_trace(tmp_path / "r.npz").ids)

    assert num_left_at(100, 0) == 1
    assert num_left_at(129, 1) == 1
    seconds = 4.0
    assert num_left_at(130, 2) == 3
    assert num_left_at(130 + 79, 3) == 3
    seconds = 0.0
    assert num_left_at(130 + 80, 4) == 5

    def refuse(writer: Any) -> None:
        raise TraceError("no room")

    monkeypatch.setattr(trace.TraceWriter, "save", refuse)
    assert num_left_at(300, 5) == 5
    assert caplog.records[-1].message == (
        "expert cache: the trace so far is not saved, later again: no room"
    )
    monkeypatch.setattr(trace.TraceWriter, "save", save)
    assert num_left_at(400, 6) == 7
    assert made.end() == str(tmp_path / "r.npz")


def test_a_file_that_cannot_grow_ends_the_trace_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from hotexperts.simulate.writer import TraceWriter

    made, rows = recorder(tmp_path / "r.npz")
    for buffer in rows:
        buffer.copy_(torch.tensor([3, 5]).expand(8, 2))
    made.after_step(step({"a": ([7], None, 0)}, {}, {"a": 1}), runner("a"))

    def full(*args: Any) -> None:
        raise TraceError("the disk is full")

    monkeypatch.setattr(TraceWriter, "append", full)
    for position in (1, 2):
        made.after_step(step({}, {"a": position}, {"a": 1}), runner("a"))
    assert [r.message for r in caplog.records] == [
        "expert cache: the trace ends here: the disk is full"
    ]
    made.end()
    assert len(read_trace(tmp_path / "r.npz").ids) == 1


def test_nothing_recorded_is_no_file(tmp_path: Path) -> None:
    made, _ = recorder(tmp_path / "r.npz")
    assert made.end() is None
    assert list(tmp_path.iterdir()) == []


def test_layers_of_a_draft_model_and_layers_that_differ(tmp_path: Path) -> None:
    made, _ = recorder(tmp_path / "r.npz")
    assert made.rows_of(layer(2), 100, CPU) is None
    made = Recorder(tmp_path / "r.npz", 2, 8, CONFIG)
    made.rows_of(layer(0), 100, CPU)
    with pytest.raises(UnsupportedModelError, match="l1 has 3 experts a token, the first layer 2"):
        made.rows_of(layer(1, top_k=3), 100, CPU)


def test_the_order_of_rows_is_the_runners() -> None:
    """The second runner keeps its batch for sampling only; one that says nothing is refused."""
    scheduled = step({}, {}, {"a": 1, "b": 2})
    second = SimpleNamespace(execute_model_state=runner("b", "a"))
    assert row_order(scheduled, second) == ["b", "a"]
    assert row_order(scheduled, runner("a", "b")) == ["a", "b"]
    with pytest.raises(UnsupportedModelError, match="in which order its requests run"):
        row_order(scheduled, runner("a"))


def test_each_rank_has_a_file_of_its_own() -> None:
    alone, pair = SimpleNamespace(world_size=1), SimpleNamespace(world_size=2)
    assert trace_path("/tmp/r.npz", alone, 0) == Path("/tmp/r.npz")
    assert trace_path("/tmp/r.x.npz", pair, 1) == Path("/tmp/r.x.rank1.npz")


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("r.txt", {}, ConfigError, "trace: .*end the name in .npz"),
        ("no/r.npz", {}, ConfigError, "trace: .*no such folder"),
        (
            "r.npz",
            {"distributed_executor_backend": "ray"},
            UnsupportedOperationError,
            "trace does not work with Ray",
        ),
        ("r.npz", {"data_parallel_size": 2}, UnsupportedOperationError, "--data-parallel-size 1"),
        (
            "r.npz",
            {"prefill_context_parallel_size": 2},
            UnsupportedOperationError,
            "--prefill-context-parallel-size 1",
        ),
    ],
)
def test_a_trace_that_would_not_come_is_refused(
    name: str, changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    wanted = options.parse({"size": 4, "options": {"trace": str(tmp_path / name)}})
    parallel = SimpleNamespace(**{"data_parallel_size": 1} | changes)
    with pytest.raises(error, match=message):
        refusals._check_trace(SimpleNamespace(parallel_config=parallel), wanted.trace)
