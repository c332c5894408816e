"""Writing a pack: once a checkpoint, resumable, whole or not there at all."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from hotexperts.cache.pack_format import MAGIC, WRITTEN, PackHeader, RowPlace
from hotexperts.cache.pack_source import check_sources
from hotexperts.cache.store import ExpertStore
from hotexperts.config import format_bytes
from hotexperts.errors import ConfigError, HotExpertsError, StorageError
from hotexperts.plain_file import plain

_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_pack(
    path: Path,
    header: PackHeader,
    stores: Sequence[ExpertStore],
    *,
    files: Sequence[Path] = (),
    after_each: Callable[[int], None] = lambda num_done: None,
) -> int:
    """Write every row of the stores; a pack that was begun and interrupted is gone on with.

    Until it is whole it is called `<name>.partial`. An interrupt leaves that for the next time;
    any other fault leaves nothing.

    Args:
        path: of the pack; one that is there is replaced. A link stays: what it leads to is written.
        header: what it holds.
        stores: one a layer of the header.
        files: the checkpoint's, which must not change meanwhile.
        after_each: called with the number of rows that are written.

    Returns:
        How many rows an earlier attempt had written.

    Raises:
        StorageError: the disk is full or faulty, or the folder is not to be written.
        ConfigError: another process is writing the same pack, or something else has its name.
        CheckpointError: the checkpoint changed meanwhile.
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    partial = path.with_name(f"{path.name}.partial")
    with _opened(partial) as fd, _leaving_nothing(partial, header.nbytes):
        num_kept = _num_rows_kept(fd, header)
        if num_kept == 0:
            os.ftruncate(fd, 0)
        _reserve(fd, partial, header.nbytes)
        _write(fd, header.encoded, 0)
        after_each(num_kept)
        _write_rows(fd, header, stores, num_kept, after_each)
        if files:
            check_sources(path, header.sources, files)
        os.fsync(fd)
        partial.replace(path)
        _sync_folder(path.parent)
    return num_kept


def is_whole(path: Path, header: PackHeader) -> bool:
    """Whether a pack of just this is there, every row as it was written; reads all of it."""
    try:
        fd = os.open(plain(path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        is_long = os.fstat(fd).st_size == header.nbytes
        return is_long and _num_rows_kept(fd, header) == header.num_rows
    except OSError:  # a disk that does not give a row
        return False
    finally:
        os.close(fd)


@contextmanager
def _opened(partial: Path) -> Iterator[int]:
    """The file, which nobody else writes meanwhile."""
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(plain(partial), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(
            f"{partial.parent}: a pack cannot be written there ({error.strerror}): name another "
            "file (--expert-pack FILE)"
        ) from error
    try:
        if not _locked(fd, partial):
            raise ConfigError(f"{partial}: another process is writing this pack: try again later")
        if not _may_be_ours(fd):
            raise ConfigError(
                f"{partial} is there and is no part of a pack: name another file (--expert-pack), "
                "or delete it"
            )
        yield fd
    finally:
        os.close(fd)


def _may_be_ours(fd: int) -> bool:
    """Whether it is new, a pack, or room for one, as a kill before the header leaves it."""
    is_file = stat.S_ISREG(os.fstat(fd).st_mode)
    return is_file and os.pread(fd, len(MAGIC), 0) in (b"", MAGIC, bytes(len(MAGIC)))


def _locked(fd: int, partial: Path) -> bool:
    """Whether the file is ours now, and was not renamed by who had it before."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), partial.stat())
    except OSError:
        return False


@contextmanager
def _leaving_nothing(partial: Path, nbytes: int) -> Iterator[None]:
    """Whatever fails inside, but for an interrupt, leaves no file; a full disk is explained."""
    try:
        yield
    except Exception as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, HotExpertsError) or not isinstance(error, OSError):
            raise
        if error.errno in _FULL:
            raise _too_full(partial.parent, nbytes) from error
        raise StorageError(
            f"{partial.parent}: the pack cannot be written ({error.strerror}); nothing is left "
            "there: name another file (--expert-pack FILE)"
        ) from error


def _too_full(folder: Path, nbytes: int) -> StorageError:
    return StorageError(
        f"{folder}: a pack of {format_bytes(nbytes)} does not fit, "
        f"{format_bytes(_free_bytes(folder))} is available; nothing is left there: make room, or "
        "name another file (--expert-pack FILE)"
    )


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _reserve(fd: int, partial: Path, nbytes: int) -> None:
    """Have the disk promise the room now, not refuse it at the last row."""
    taken = os.fstat(fd).st_blocks * 512
    if nbytes - taken > _free_bytes(partial.parent):
        raise _too_full(partial.parent, nbytes)
    os.posix_fallocate(fd, 0, nbytes)


def _num_rows_kept(fd: int, header: PackHeader) -> int:
    """Rows at the beginning that an earlier attempt wrote, and that are as it wrote them."""
    if os.pread(fd, len(header.encoded), 0) != header.encoded:
        return 0
    for num_kept, (_, _, place) in enumerate(_all_rows(header)):
        entry = os.pread(fd, 8, header.table_place(place.number))
        row = os.pread(fd, place.nbytes, place.offset)
        if len(row) != place.nbytes or entry != _entry(zlib.crc32(row)):
            return num_kept
    return header.num_rows


def _write_rows(
    fd: int,
    header: PackHeader,
    stores: Sequence[ExpertStore],
    num_kept: int,
    after_each: Callable[[int], None],
) -> None:
    for layer, expert, place in _all_rows(header):
        if place.number < num_kept:
            continue
        row = torch.zeros(1, place.nbytes, dtype=torch.uint8)
        layout = header.layers[layer].layout
        views = layout.views(row[:, : layout.row_nbytes])
        stores[layer].copy_into(expert, [tensor[0] for tensor in views])
        content = memoryview(row.numpy()).cast("B")
        _write(fd, content, place.offset)
        _write(fd, _entry(zlib.crc32(content)), header.table_place(place.number))
        after_each(place.number + 1)


def _all_rows(header: PackHeader) -> Iterator[tuple[int, int, RowPlace]]:
    """Layer, expert and place of each row, in the file's order."""
    for layer, packed in enumerate(header.layers):
        for expert in range(packed.num_experts):
            yield layer, expert, header.place(layer, expert)


def _entry(checksum: int) -> bytes:
    return (WRITTEN | checksum).to_bytes(8, "little")


def _write(fd: int, content: bytes | memoryview, offset: int) -> None:
    view = memoryview(content)
    while view:
        num_written = os.pwrite(fd, view, offset)
        view, offset = view[num_written:], offset + num_written


def _sync_folder(folder: Path) -> None:
    """The name, too, survives a loss of power."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
