"""One row of a pack on its way: read in pieces, several at once, and proven as they come.

A layer call waits for its last row. Were each row one read, all rows of a call would end together,
and everything that follows, the checksums and the copies into slots, would begin when the disk has
nothing more to do. In pieces, the first row is whole early, and the rest happens meanwhile.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from typing import TypeAlias

from hotexperts.errors import HotExpertsError

PIECE_NBYTES = 1 << 20  # 8 in flight keep a disk busy, and one takes the checksum 0.2 ms
ReadPiece: TypeAlias = Callable[[memoryview, int], HotExpertsError | None]


class RowRead:
    """A row under way; whoever is free reads a piece of it.

    Pieces are proven in their order, each by whoever brought the last one that was missing. A piece
    that fails is read once more, and so is the row if it has other bytes than were written.

    Args:
        buffer: where the row goes; nobody else's until `done` is.
        read: reads so many bytes at an offset of the row, or says why not.
        checksum: of the row, as `zlib.crc32` has it.
        damage: the error of a row with other bytes.

    Attributes:
        done: None, or the error; only when no piece is under way any more.
    """

    def __init__(
        self,
        buffer: memoryview,
        read: ReadPiece,
        checksum: int,
        damage: Callable[[], HotExpertsError],
    ) -> None:
        self.done: Future[None] = Future()
        self._buffer, self._read, self._checksum, self._damage = buffer, read, checksum, damage
        cuts = [*range(0, len(buffer), PIECE_NBYTES), len(buffer)]
        self._pieces = list(pairwise(cuts))
        self._has_come = [False] * len(self._pieces)
        self._num_proven = self._found = 0
        self._is_proving = False
        self._fault: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def num_pieces(self) -> int:
        """Calls of `read_piece` that make the row whole."""
        return len(self._pieces)

    def read_piece(self, index: int) -> None:
        """Read one piece, and prove what has come; the last one finishes the row."""
        begin, end = self._pieces[index]
        fault = self._attempt(begin, end) and self._attempt(begin, end)
        with self._lock:
            self._fault = self._fault or fault
            self._has_come[index] = True
        if self._prove():
            self._finish()

    def _attempt(self, begin: int, end: int) -> BaseException | None:
        """The error, where the bytes did not come."""
        try:
            return self._read(self._buffer[begin:end], begin)
        except BaseException as error:  # or `done` would never be
            return error

    def _prove(self) -> bool:
        """Add to the checksum what has come; whether that was the rest of the row.

        One thread at a time; who finds another one here leaves its piece to it.
        """
        with self._lock:
            if self._is_proving:
                return False
            self._is_proving = True
        while True:
            with self._lock:
                index = self._num_proven
                if index == len(self._pieces):
                    return True  # and nobody else enters
                if not self._has_come[index]:
                    self._is_proving = False
                    return False
            begin, end = self._pieces[index]
            self._found = zlib.crc32(self._buffer[begin:end], self._found)
            self._num_proven += 1

    def _finish(self) -> None:
        fault = self._fault
        if fault is None and self._found != self._checksum:
            fault = self._attempt(0, len(self._buffer))
            if fault is None and zlib.crc32(self._buffer) != self._checksum:
                fault = self._damage()
        if fault is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(fault)
