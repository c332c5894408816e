"""A saved state: a restarted cache has the same residents and decides alike."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hotexperts.cache import CachedWeightProvider, CPUBackingStore, warm_start
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.cache.streaming import StreamingProvider
from hotexperts.errors import CheckpointError, ConfigError

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu"
NUM_EXPERTS, CAPACITY, K = 12, 5, 2
ABOUT = warm_start.About("lru", "device", CAPACITY, "0123456789abcdef")


def make(mode: str, *, policy: str = "lru", first_value: int = 0) -> StreamingProvider:
    values = torch.arange(NUM_EXPERTS, dtype=torch.float32).view(-1, 1).expand(-1, 8) + first_value
    store = CPUBackingStore.from_tensors({"w": values.contiguous()}, pin=DEVICE == "cuda")
    cls: Any = DeviceWeightProvider if mode == "device" else CachedWeightProvider
    provider: StreamingProvider = cls(store, CAPACITY, policy=policy, device=DEVICE)
    provider.slot_buffer.fill_(-1)
    return provider


def slots_of(provider: Any) -> list[int]:
    return provider.slot_of if hasattr(provider, "slot_of") else provider.slots.slot_of


def serve(provider: StreamingProvider, seed: int, num_events: int) -> list[list[int]]:
    """Random events; the slots that each was given."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num_events):
        ids = torch.rand(1, NUM_EXPERTS, generator=generator).topk(K).indices.to(DEVICE)
        result = provider.prepare(ids)
        found.append(result.topk_ids.flatten().tolist())
        assert result.tensors.w[result.topk_ids, 0].long().tolist() == ids.tolist()
    return found


@pytest.mark.interpret
@pytest.mark.parametrize("mode", ["host", "device"])
@pytest.mark.parametrize("policy", ["lru", "adv"])
def test_a_restart_goes_on_as_if_there_was_none(mode: str, policy: str, tmp_path: Path) -> None:
    about = warm_start.About(policy, mode, CAPACITY)
    before, after = make(mode, policy=policy), make(mode, policy=policy)
    serve(before, 0, 12)
    warm_start.save(tmp_path / "state", {"a": before}, about)
    warm_start.load(tmp_path / "state", {"a": after}, about)
    assert after.stats.demands == 0
    assert slots_of(after) == slots_of(before)
    assert serve(after, 1, 8) == serve(before, 1, 8)


@pytest.mark.interpret
def test_bytes_come_from_the_store_of_now(tmp_path: Path) -> None:
    """The file holds no weights: a model with the same shapes and others gets its own."""
    before, after = make("device"), make("device", first_value=100)
    serve(before, 0, 8)
    warm_start.save(tmp_path / "state", {"a": before}, ABOUT)
    warm_start.load(tmp_path / "state", {"a": after}, ABOUT)
    held = {e: s for e, s in enumerate(slots_of(after)) if s >= 0}
    assert len(held) == CAPACITY
    values = after.slot_tensors.w[:, 0].tolist()
    assert {e: values[s] for e, s in held.items()} == {e: e + 100.0 for e in held}


def saved(tmp_path: Path) -> Path:
    provider = make("device")
    serve(provider, 0, 6)
    warm_start.save(tmp_path / "state", {"a": provider}, ABOUT)
    return tmp_path / "state"


@pytest.mark.interpret
def test_another_cache_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = saved(tmp_path)
    provider = make("device")
    with pytest.raises(ConfigError, match="saved with capacity 5, and this cache has 4"):
        warm_start.load(path, {"a": provider}, replace(ABOUT, capacity=4))
    with pytest.raises(ConfigError, match="1 layers, the first of them a, and this one has 2"):
        warm_start.load(path, {"a": provider, "b": provider}, ABOUT)
    other = CPUBackingStore.from_tensors({"v": torch.zeros(12, 8)}, pin=DEVICE == "cuda")
    strange = DeviceWeightProvider(other, CAPACITY, device=DEVICE)
    with pytest.raises(ConfigError, match=r"whose a has 12 experts of w 8 float32.*of v 8 float32"):
        warm_start.load(path, {"a": strange}, ABOUT)


@pytest.mark.interpret
def test_a_file_of_another_model_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    path, provider = saved(tmp_path), make("device")
    with pytest.raises(
        ConfigError,
        match=r"is of another model with the same shapes .its weights have the digest "
        "0123456789abcdef, and here it is fedcba9876543210.: give that model, or name another file",
    ):
        warm_start.load(path, {"a": provider}, replace(ABOUT, model="fedcba9876543210"))
    assert set(slots_of(provider)) == {-1}
    warm_start.load(path, {"a": provider}, replace(ABOUT, model=None))  # of an engine without one
    content = json.loads(path.read_text())
    del content["model"]
    path.write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=r"does not say which model it is of.*: delete it, or"
    ):
        warm_start.load(path, {"a": provider}, ABOUT)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda words: words[:-1], r"57 words of state, not the 58 of 'lru' here: another version"),
        (lambda words: [2**40, *words[1:]], "not all of 58 words of state are of 32 bits"),
        (lambda words: ["x", *words[1:]], "not all of 58 words of state are of"),
        (lambda words: [5, *words[1:]], "uses before the first of 5 events, or after the last"),
        (lambda words: [-1, *words[1:]], "uses before the first of -1 events, or after the last"),
        (lambda words: [*words[:-2], -2, words[-1]], "uses before the first of 6 events"),
        (lambda words: [*words[:16], 3, 3, *words[18:]], "in slot 3 of 5, which is taken or none"),
        (lambda words: [*words[:16], 99, *words[17:]], "in slot 99 of 5"),
        (lambda words: [*words[:28], *[-1] * CAPACITY, *words[33:]], "disagree"),
        (lambda words: None, "cannot be restored"),
    ],
)
def test_a_damaged_file_leaves_an_empty_cache(change: Any, message: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = json.loads(path.read_text())
    content["layers"]["a"]["state"]["words"] = change(content["layers"]["a"]["state"]["words"])
    path.write_text(json.dumps(content))
    provider = make("device")
    with pytest.raises(CheckpointError, match=r"is damaged \(its digest is another\): delete it"):
        warm_start.load(path, {"a": provider}, ABOUT)
    content["digest"] = warm_start.digest(content["layers"])  # of a writer that was wrong
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        warm_start.load(path, {"a": provider}, ABOUT)
    assert set(slots_of(provider)) == {-1}
    serve(provider, 3, 2)


def test_a_link_stays_and_its_state_is_written_where_it_leads(tmp_path: Path) -> None:
    target, link = tmp_path / "kept" / "state", tmp_path / "state"
    target.parent.mkdir()
    link.symlink_to(target)
    for capacity in (3, 4):  # it leads to nothing, then to a state
        warm_start.save(link, {}, warm_start.About("lru", "host", capacity))
        assert link.is_symlink()
        assert json.loads(target.read_text())["capacity"] == capacity
        assert list(target.parent.iterdir()) == [target]


def test_a_device_is_not_replaced_by_a_state(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: a pipe is there: name a file"):
        warm_start.save(tmp_path / "pipe", {}, ABOUT)
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(CheckpointError, match=r"cannot read .*pipe \(a pipe is there, and a file"):
        warm_start.load(tmp_path / "pipe", {}, ABOUT)


def test_an_interrupt_while_a_state_is_saved_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_start.save(tmp_path / "state", {}, warm_start.About("lru", "host", 3))

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        warm_start.save(tmp_path / "state", {}, warm_start.About("lru", "host", 4))
    assert list(tmp_path.iterdir()) == [tmp_path / "state"]
    assert json.loads((tmp_path / "state").read_text())["capacity"] == 3


def test_what_is_no_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    for text, message in (
        ("{", "holds no state"),
        ("[]", "holds no state"),
        ('{"layers": {"a": 3}}', "holds no state"),
        ('{"format": 9, "layers": {}}', "has format 9, and this version reads 2"),
    ):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            warm_start.load(path, {}, ABOUT)
    with pytest.raises(
        CheckpointError, match=r"cannot read .*missing .No such file.*: name a file"
    ):
        warm_start.load(tmp_path / "missing", {}, ABOUT)
    with pytest.raises(ConfigError, match=r"cannot write .* .No such file.*: make room"):
        warm_start.save(tmp_path / "none" / "state", {}, ABOUT)
