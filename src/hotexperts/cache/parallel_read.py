"""Many pieces of files read at once, by threads, straight to where they belong."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import torch

from hotexperts.errors import CheckpointError
from hotexperts.plain_file import plain

NUM_THREADS = 8  # a disk is fastest with several requests under way
CALL_NBYTES = 4 << 20  # of one read: an interrupt waits for no more than one a thread
CALL_BUFFERS = 512  # of one read; the system takes 1024


class Span(NamedTuple):
    """Bytes of a file, and where they go.

    Attributes:
        path: the file.
        begin: of the bytes, from the file's start.
        target: uint8 `[n]` in host memory, contiguous; as many are read.
    """

    path: Path
    begin: int
    target: torch.Tensor


class ParallelReader:
    """Reads spans in threads of its own, which end when the block is left, however it is left."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="hotexperts-read")
        self._stop = threading.Event()
        self._files: dict[Path, int] = {}
        self._pending: set[Future[int]] = set()

    def __enter__(self) -> ParallelReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)

    def submit(self, spans: Iterable[Span]) -> None:
        """Begin to read.

        Raises:
            CheckpointError: a file cannot be opened.
        """
        for run in adjacent(spans):
            descriptor = self._descriptor(run[0].path)
            self._pending.add(self._pool.submit(self._read, descriptor, run))

    def take_done(self, *, waits: bool = False) -> int:
        """Bytes read since the last call; `waits` for some, where any are still to come.

        Raises:
            CheckpointError: a file cannot be read, or has become shorter.
        """
        timeout = None if waits else 0
        done, self._pending = wait(self._pending, timeout, return_when=FIRST_COMPLETED)
        return sum(future.result() for future in done)

    @property
    def has_pending(self) -> bool:
        """Whether `take_done` has not told of everything yet."""
        return bool(self._pending)

    def _descriptor(self, path: Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(plain(path), os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise _unreadable(path, error) from error
        return self._files[path]

    def _read(self, descriptor: int, run: Sequence[Span]) -> int:
        buffers = [memoryview(span.target.numpy()) for span in run]
        place, num_read = run[0].begin, 0
        while buffers and not self._stop.is_set():
            try:
                count = os.preadv(descriptor, buffers, place + num_read)
            except OSError as error:
                raise _unreadable(run[0].path, error) from error
            if count == 0:
                raise CheckpointError(
                    f"{run[0].path}: ends at byte {place + num_read}, where tensors were when "
                    "loading began: download it again, and leave it alone while it loads"
                )
            num_read += count
            buffers = _rest(buffers, count)
        return num_read


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({error}): download it again")


def _rest(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left to fill after `count` bytes: a read may bring fewer than asked for."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers[0])
        buffers = buffers[1:]
    return [buffers[0][count:], *buffers[1:]] if buffers else []


def adjacent(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Spans in the files' order, those that follow one another together, for one call each.

    Empty spans are left out. A span longer than a call is cut.
    """
    run: list[Span] = []
    end = nbytes = 0
    for span in sorted(_cut(spans), key=lambda span: (span.path, span.begin)):
        follows = run and run[0].path == span.path and end == span.begin
        has_room = nbytes + len(span.target) <= CALL_NBYTES and len(run) < CALL_BUFFERS
        if run and not (follows and has_room):
            yield run
            run, nbytes = [], 0
        run.append(span)
        end, nbytes = span.begin + len(span.target), nbytes + len(span.target)
    if run:
        yield run


def _cut(spans: Iterable[Span]) -> Iterator[Span]:
    for path, begin, target in spans:
        for first in range(0, len(target), CALL_NBYTES):
            yield Span(path, begin + first, target[first : first + CALL_NBYTES])
