"""Reading a pack: rows past the page cache, several at once, each one proven."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hotexperts.cache.pack_format import (
    ALIGNMENT,
    MOVE,
    WRITTEN,
    PackHeader,
    RowPlace,
    cannot_read,
    damaged_row,
)
from hotexperts.cache.row_read import RowRead
from hotexperts.errors import HotExpertsError, StorageError

NUM_READERS = 8  # reads in flight: a disk wants several, and rows are large
Preadv: TypeAlias = Callable[[int, Sequence[Any], int], int]


class PackFile:
    """An open pack.

    A read that fails, is short or brings other bytes than were written is tried once more; then it
    is an error, and nobody may use the buffer's bytes.

    Args:
        path: the file.
        preadv: reads; tests give one that fails.

    Attributes:
        path: the file.
        header: what it holds.
        reason: why reads go through the page cache; None where they bypass it.

    Raises:
        CheckpointError: it is no pack, or a damaged or truncated one.
        StorageError: it cannot be read.
    """

    def __init__(self, path: Path, *, preadv: Preadv = os.preadv) -> None:
        self.path = path
        self.header = PackHeader.read(path)
        self._preadv = preadv
        try:
            self._fd, self.reason = _open(path)
            weakref.finalize(self, os.close, self._fd)
            with path.open("rb") as file:
                file.seek(self.header.table_place())
                table = file.read(8 * self.header.num_rows)
        except OSError as error:
            raise cannot_read(path, error) from error
        self._checksums = np.frombuffer(table, dtype="<u8").tolist()
        self._readers, self._process = _make_readers(), os.getpid()

    def begin_read(self, layer: int, expert: int, buffer: memoryview) -> Future[None]:
        """Start to read one row; the result is None, or the error.

        Args:
            layer: counted from 0.
            expert: its number.
            buffer: as many bytes as the layer's `row_stride`, at an address that is a multiple of
                4096; it is the reader's until the result is there.
        """
        if self._process != os.getpid():  # a fork has none of the threads, and would wait for them
            self._readers, self._process = _make_readers(), os.getpid()
        place = self.header.place(layer, expert)
        assert len(buffer) == place.nbytes, (len(buffer), place)
        row = RowRead(
            buffer,
            partial(self._read, layer, expert, place),
            self._checksums[place.number] ^ WRITTEN,  # no checksum has this bit
            partial(damaged_row, self.path, self.header.layers[layer], expert),
        )
        for piece in range(row.num_pieces):
            self._readers.submit(row.read_piece, piece)
        return row.done

    def finish_reads(self) -> None:
        """Wait for every read that was begun, whoever knows of it."""
        before, self._readers = self._readers, _make_readers()
        before.shutdown()

    def _read(
        self, layer: int, expert: int, place: RowPlace, buffer: memoryview, begin: int
    ) -> HotExpertsError | None:
        """Bytes of a row from `begin` on; the error, where they did not come."""
        what = f"{self.path}: expert {expert} of {self.header.layers[layer].name}"
        try:
            num_read = self._preadv(self._fd, [buffer], place.offset + begin)
        except OSError as error:
            return StorageError(f"{what} cannot be read ({error.strerror}, tried twice): {MOVE}")
        if num_read != len(buffer):
            return StorageError(
                f"{what}: the disk gave {num_read} of {len(buffer)} bytes, tried twice: {MOVE}"
            )
        return None


def _make_readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_READERS, thread_name_prefix="hotexperts-disk")


def _open(path: Path) -> tuple[int, str | None]:
    """A descriptor for reads that bypass the page cache, or an ordinary one and why."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        try:
            os.preadv(fd, [mmap.mmap(-1, ALIGNMENT)], 0)  # some refuse only now
        except OSError:
            os.close(fd)
        else:
            return fd, None
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), "its file system has no direct reads"
