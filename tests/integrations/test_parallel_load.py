"""Rows read by threads are the rows that the file's views give, and an interrupt ends it all."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import hotexperts.transformers as hot
from hotexperts.cache import parallel_read
from hotexperts.integrations.transformers.checkpoint import ExpertCheckpoint
from integrations import zoo

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]


def load(path: Path, store: str, **options: Any) -> Any:
    return hot.load(path, expert_cache_size=2, device="cpu", expert_store=store, **options)


def rows(model: Any) -> list[list[torch.Tensor]]:
    """Every tensor of every expert, as its store copies it."""
    found = []
    for provider in model.expert_cache.providers:
        for expert in range(provider.store.num_experts):
            specs = provider.store.layout.specs
            row = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
            provider.store.copy_into(expert, row)
            found.append(row)
    return found


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_rows_read_by_threads_are_the_files_own(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_read, "CALL_NBYTES", 1000)  # tensors are cut, and joined
    path = zoo.save_checkpoint(family, tmp_path)
    read, viewed = rows(load(path, "ram")), rows(load(path, "file"))
    for row, expected in zip(read, viewed, strict=True):
        for tensor, wanted in zip(row, expected, strict=True):
            assert torch.equal(tensor, wanted)


def test_bytes_that_stay_as_they_are_are_read_by_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another dtype than the file's is converted instead, one expert after another."""
    path, seen = zoo.save_checkpoint("olmoe", tmp_path), []
    spans = ExpertCheckpoint.spans

    def spy(*args: Any) -> Any:
        seen.append(spans(*args))
        return seen[-1]

    monkeypatch.setattr(ExpertCheckpoint, "spans", spy)
    cache = load(path, "ram").expert_cache
    assert sum(len(s.target) for found in seen for s in found) == cache.expert_nbytes
    seen.clear()
    load(path, "ram", dtype=torch.float32)
    assert seen == [None, None]


def test_an_interrupt_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_read, "CALL_NBYTES", 1000)  # many reads
    path = zoo.save_checkpoint("olmoe", tmp_path)

    def interrupt(done: int, total: int) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            load(path, "ram", progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [t for t in threading.enumerate() if t.name.startswith("hotexperts-read")]
    assert rows(load(path, "ram"))[0][0].any()  # and the next one loads
