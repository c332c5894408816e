"""Reading by threads: every byte where it belongs, faults that name the file, a clean end."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
import torch

from hotexperts.cache import parallel_read
from hotexperts.cache.parallel_read import ParallelReader, Span, adjacent
from hotexperts.errors import CheckpointError


def write(path: Path, num_bytes: int) -> bytes:
    data = random.Random(num_bytes).randbytes(num_bytes)
    path.write_bytes(data)
    return data


def read_all(spans: list[Span]) -> int:
    with ParallelReader() as reader:
        reader.submit(spans)
        num_read = 0
        while reader.has_pending:
            num_read += reader.take_done(waits=True)
    return num_read


def num_threads() -> int:
    return sum(thread.name.startswith("hotexperts-read") for thread in threading.enumerate())


@pytest.mark.parametrize("call_nbytes", [7, 100, 4 << 20])
def test_every_byte_arrives(
    call_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_read, "CALL_NBYTES", call_nbytes)
    files = [tmp_path / name for name in ("b", "a")]
    texts = [write(path, 1000) for path in files]
    rows = torch.zeros(2, 10, 128, dtype=torch.uint8)
    spans = [
        Span(path, 100 * i, rows[f, i, :100])
        for f, path in enumerate(files)
        for i in random.Random(f).sample(range(10), 10)
    ]
    spans.append(Span(files[0], 3, rows[0, 0, :0]))  # a tensor of no bytes
    assert read_all(spans) == 2000
    for f, text in enumerate(texts):
        assert bytes(rows[f, :, :100].flatten().tolist()) == text
    assert not rows[:, :, 100:].any()  # padding stays zero


def test_a_read_may_bring_less_than_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write(tmp_path / "a", 50)
    whole = os.preadv

    def little(descriptor: int, buffers: list[memoryview], place: int) -> int:
        return whole(descriptor, [buffers[0][:3]], place)

    monkeypatch.setattr(os, "preadv", little)
    parts = torch.zeros(50, dtype=torch.uint8).split([10, 1, 39])
    begins = (0, 10, 11)
    spans = [Span(tmp_path / "a", *place) for place in zip(begins, parts, strict=True)]
    assert read_all(spans) == 50
    assert b"".join(bytes(part.tolist()) for part in parts) == text


def test_neighbours_are_read_together_up_to_a_limit() -> None:
    target = torch.zeros(parallel_read.CALL_NBYTES, dtype=torch.uint8)
    a, b = Path("a"), Path("b")
    spans = [Span(a, 20, target[:5]), Span(b, 25, target[:5]), Span(a, 10, target[:10])]
    spans += [Span(a, 25, target), Span(a, 30 + len(target), target[:1])]
    runs = [[(s.path, s.begin, len(s.target)) for s in run] for run in adjacent(spans)]
    assert runs == [
        [(a, 10, 10), (a, 20, 5)],
        [(a, 25, len(target))],
        [(a, 30 + len(target), 1)],
        [(b, 25, 5)],
    ]


def test_a_file_that_has_become_shorter_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a", 50)
    with pytest.raises(CheckpointError, match=r"/a: ends at byte 50, where tensors were"):
        read_all([Span(tmp_path / "a", 40, torch.zeros(20, dtype=torch.uint8))])
    with pytest.raises(CheckpointError, match=r"/gone: cannot be read \(.*No such file"):
        read_all([Span(tmp_path / "gone", 0, torch.zeros(1, dtype=torch.uint8))])
    with pytest.raises(CheckpointError, match=r"cannot be read \(.*a folder"):
        read_all([Span(tmp_path, 0, torch.zeros(1, dtype=torch.uint8))])
    assert num_threads() == 0


def test_an_interrupt_ends_the_threads_and_closes_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_read, "CALL_NBYTES", 10)
    write(tmp_path / "a", 1000)
    target = torch.zeros(1000, dtype=torch.uint8)
    reader, whole, num_calls = ParallelReader(), os.preadv, [0]

    def slow(descriptor: int, buffers: list[memoryview], place: int) -> int:
        num_calls[0] += 1
        assert reader._stop.wait(60)  # the disk answers after the interrupt
        return whole(descriptor, buffers, place)

    monkeypatch.setattr(os, "preadv", slow)
    reader.submit([Span(tmp_path / "a", 0, target)])
    (descriptor,) = reader._files.values()
    with pytest.raises(KeyboardInterrupt), reader:
        raise KeyboardInterrupt
    assert num_calls[0] <= parallel_read.NUM_THREADS  # of 100
    assert num_threads() == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
