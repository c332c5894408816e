"""A row read in pieces: whole and proven when it is done, whoever brings which piece when."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from hotexperts.cache import row_read
from hotexperts.cache.row_read import RowRead
from hotexperts.errors import CheckpointError, HotExpertsError, StorageError

ROW = random.Random(0).randbytes(1003)
NUM_PIECES = 11  # the last one of 3 bytes


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_read, "PIECE_NBYTES", 100)


def from_memory(piece: memoryview, begin: int) -> HotExpertsError | None:
    piece[:] = ROW[begin : begin + len(piece)]
    return None


def row(read: row_read.ReadPiece = from_memory) -> tuple[RowRead, bytearray]:
    buffer = bytearray(len(ROW))
    found = RowRead(memoryview(buffer), read, zlib.crc32(ROW), lambda: CheckpointError("damaged"))
    return found, buffer


def failing(times: dict[int, int], error: Exception) -> row_read.ReadPiece:
    """Reads at these places fail so often, with garbage in the buffer."""
    left = dict(times)

    def read(piece: memoryview, begin: int) -> HotExpertsError | None:
        if left.get(begin, 0) == 0:
            return from_memory(piece, begin)
        left[begin] -= 1
        piece[:] = bytes(len(piece))
        if isinstance(error, HotExpertsError):
            return error
        raise error

    return read


@pytest.mark.parametrize("seed", range(5))
def test_pieces_come_in_any_order(seed: int) -> None:
    found, buffer = row()
    assert found.num_pieces == NUM_PIECES
    order = random.Random(seed).sample(range(NUM_PIECES), NUM_PIECES)
    for index in order:
        assert not found.done.done()
        found.read_piece(index)
    assert found.done.result(0) is None
    assert buffer == ROW


def test_many_threads_finish_each_row_once() -> None:
    """A second result would be an error of the future's."""
    with ThreadPoolExecutor(8) as pool:
        for _ in range(300):
            found, buffer = row()
            calls = [pool.submit(found.read_piece, index) for index in range(NUM_PIECES)]
            found.done.result(10)
            assert buffer == ROW
            for call in calls:
                call.result(10)


@pytest.mark.parametrize("error", [StorageError("no"), ValueError("what")])
def test_a_piece_that_fails_is_read_once_more(error: Exception) -> None:
    found, buffer = row(failing({200: 1, 1000: 1}, error))
    for index in range(NUM_PIECES):
        found.read_piece(index)
    assert found.done.result(0) is None
    assert buffer == ROW


@pytest.mark.parametrize("error", [StorageError("no"), ValueError("what")])
@pytest.mark.parametrize("begin", [0, 500, 1000])
def test_a_piece_that_fails_twice_fails_the_row_when_all_have_ended(
    error: Exception, begin: int
) -> None:
    found, _ = row(failing({begin: 2}, error))
    for index in range(NUM_PIECES):
        assert not found.done.done()
        found.read_piece(index)
    assert found.done.exception(0) is error


def corrupted(num_times: int) -> row_read.ReadPiece:
    """The first reads at byte 300 bring one wrong bit."""
    left = [num_times]

    def read(piece: memoryview, begin: int) -> HotExpertsError | None:
        from_memory(piece, begin)
        if begin <= 300 < begin + len(piece) and left[0]:
            left[0] -= 1
            piece[300 - begin] ^= 1
        return None

    return read


@pytest.mark.parametrize(("num_times", "is_whole"), [(1, True), (2, False)])
def test_a_row_with_other_bytes_is_read_once_more(num_times: int, is_whole: bool) -> None:
    found, buffer = row(corrupted(num_times))
    for index in range(NUM_PIECES):
        found.read_piece(index)
    if is_whole:
        assert found.done.result(0) is None
        assert buffer == ROW
    else:
        assert str(found.done.exception(0)) == "damaged"


def test_a_late_piece_keeps_the_buffer() -> None:
    """A row that has failed is not done while another of its reads may still write."""
    may_end, has_begun = Event(), Event()
    fails: Callable[..., HotExpertsError | None] = failing({0: 2}, StorageError("no"))

    def read(piece: memoryview, begin: int) -> HotExpertsError | None:
        if begin == 100:
            has_begun.set()
            assert may_end.wait(10)
        return fails(piece, begin)

    found, _ = row(read)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(found.read_piece, 1)
        assert has_begun.wait(10)
        for index in (0, *range(2, NUM_PIECES)):
            found.read_piece(index)
        assert not found.done.done()
        may_end.set()
        late.result(10)
    assert isinstance(found.done.exception(0), StorageError)
