"""Packs: whole or not there, gone on with after an interrupt, and every fault named."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from cache.packs import NUM_EXPERTS, blank, equal, failing, flip, header_of, make_pack, make_stores
from hotexperts.cache import disk, pack_writer
from hotexperts.cache.pack_file import PackFile
from hotexperts.cache.pack_format import PackHeader
from hotexperts.cache.pack_source import SourceFile, check_sources
from hotexperts.cache.pack_writer import write_pack
from hotexperts.errors import CheckpointError, ConfigError, StorageError


def test_the_bytes_are_where_the_format_says(tmp_path: Path) -> None:
    path = tmp_path / "a.pack"
    stores = make_pack(path)
    content = path.read_bytes()
    magic, length, checksum = struct.unpack("<8sQI", content[:20])
    assert (magic, checksum) == (b"HXPACK01", zlib.crc32(content[20 : 20 + length]))
    assert 20 + length <= 4096, "or the next lines look in the wrong place"
    table = struct.unpack("<12Q", content[4096 : 4096 + 96])
    rows = [(0, e, 8192 + e * 8192, 8192) for e in range(6)]
    rows += [(1, e, 8192 + 6 * 8192 + e * 4096, 4096) for e in range(6)]
    for number, (layer, expert, begin, nbytes) in enumerate(rows):
        row = content[begin : begin + nbytes]
        kept = bytes(stores[layer].rows[expert].numpy())
        assert row == kept.ljust(nbytes, b"\0")
        assert table[number] == 2**32 + zlib.crc32(row)
    assert len(content) == 8192 + 6 * 8192 + 6 * 4096
    assert PackHeader.read(path) == header_of(stores)


def test_what_was_interrupted_is_gone_on_with(tmp_path: Path) -> None:
    stores = make_pack(tmp_path / "whole.pack")
    path, partial = tmp_path / "a.pack", tmp_path / "a.pack.partial"

    def interrupt(num_done: int) -> None:
        if num_done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_pack(path, header_of(stores), stores, after_each=interrupt)
    assert partial.exists()
    assert not path.exists()
    flip(partial, header_of(stores).place(0, 5).offset + 3)  # row 5 of the 7 is damaged since
    done: list[int] = []
    assert write_pack(path, header_of(stores), stores, after_each=done.append) == 5
    assert done == [5, 6, 7, 8, 9, 10, 11, 12]
    assert path.read_bytes() == (tmp_path / "whole.pack").read_bytes()
    assert not partial.exists()


def test_what_another_checkpoint_left_is_not_gone_on_with(tmp_path: Path) -> None:
    path, partial = tmp_path / "a.pack", tmp_path / "a.pack.partial"
    stores = make_pack(path)
    path.rename(partial)
    header = header_of(stores, [SourceFile("model.safetensors", 3, 4, "5")])
    assert write_pack(path, header, stores) == 0
    assert PackHeader.read(path) == header
    read = PackFile(path)
    tensors = blank(stores[1])
    disk.DiskBackingStore(read, 1, 2).copy_into(4, tensors)
    assert equal(tensors, stores[1], 4)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_while_packing_is_left_as_it_was(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, calls = make_stores(), iter(range(1000))
    pwrite = os.pwrite

    def full(fd: int, content: Any, offset: int) -> int:
        if next(calls) == 9:
            raise OSError(number, os.strerror(number))
        return pwrite(fd, content, offset)

    monkeypatch.setattr(pack_writer.os, "pwrite", full)
    full_disk = r"80 KiB does not fit, .* is available"
    message = full_disk if number == errno.ENOSPC else "Input/output error"
    with pytest.raises(StorageError, match=rf"{tmp_path}.*{message}.*nothing is left.*another"):
        write_pack(tmp_path / "a.pack", header_of(stores), stores)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_the_caller_s_leaves_nothing(tmp_path: Path) -> None:
    stores = make_stores()

    def fail(num_done: int) -> None:
        if num_done == 3:
            raise ZeroDivisionError("in a progress bar")

    with pytest.raises(ZeroDivisionError, match="in a progress bar"):
        write_pack(tmp_path / "a.pack", header_of(stores), stores, after_each=fail)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_seen_before_the_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_writer, "_free_bytes", lambda folder: 4096)
    stores = make_stores()
    with pytest.raises(StorageError, match=r"80 KiB does not fit, 4 KiB is available"):
        write_pack(
            tmp_path / "a.pack", header_of(stores), stores, after_each=lambda n: pytest.fail("late")
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_is_not_to_be_written_is_named(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pack_writer.os, "open", refuse)
    stores = make_stores()
    with pytest.raises(StorageError, match=rf"{tmp_path}: .*{os.strerror(number)}.*--expert-pack"):
        write_pack(tmp_path / "a.pack", header_of(stores), stores)


def test_a_folder_that_cannot_be_made_is_named() -> None:
    stores = make_stores()
    with pytest.raises(StorageError, match=r"/proc/none: a pack cannot be written there"):
        write_pack(Path("/proc/none/a.pack"), header_of(stores), stores)


def test_a_link_stays_and_its_pack_is_written_where_it_leads(tmp_path: Path) -> None:
    """A pack that was moved to a larger disk is not made again on the small one."""
    target, link = tmp_path / "large" / "b.pack", tmp_path / "a.pack"
    link.symlink_to(target)
    for _ in range(2):  # it leads to nothing, then to a pack
        stores = make_pack(link)
        assert link.is_symlink()
        assert not target.is_symlink()
        assert PackHeader.read(target) == header_of(stores)
        assert sorted(tmp_path.iterdir()) == [link, target.parent]
        assert list(target.parent.iterdir()) == [target]


def test_what_is_no_part_of_a_pack_is_not_written_over(tmp_path: Path) -> None:
    stores, partial = make_stores(), tmp_path / "a.pack.partial"
    partial.write_text("my diary")
    with pytest.raises(ConfigError, match=r"a.pack.partial is there and is no part of a pack: nam"):
        write_pack(tmp_path / "a.pack", header_of(stores), stores)
    assert partial.read_text() == "my diary"
    partial.unlink()
    os.mkfifo(partial)
    with pytest.raises(StorageError, match=r"\(a pipe is there, and a file was wanted\): name ano"):
        write_pack(tmp_path / "a.pack", header_of(stores), stores)


def test_a_kill_before_the_header_was_written_is_gone_on_with(tmp_path: Path) -> None:
    stores, partial = make_stores(), tmp_path / "a.pack.partial"
    for left in (b"", bytes(8192)):  # made; its room reserved
        partial.write_bytes(left)
        assert write_pack(tmp_path / "a.pack", header_of(stores), stores) == 0
        assert PackHeader.read(tmp_path / "a.pack") == header_of(stores)


def test_two_do_not_write_the_same_pack(tmp_path: Path) -> None:
    stores = make_stores()
    with (tmp_path / "a.pack.partial").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is writing"):
            write_pack(tmp_path / "a.pack", header_of(stores), stores)
    assert (tmp_path / "a.pack.partial").exists(), "it is the other's"


def test_a_pack_that_another_has_just_ended_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is opened while it has its first name, and locked when it has its last."""
    path, opened = tmp_path / "a.pack", os.open
    stores = make_pack(path)
    whole = path.read_bytes()
    path.rename(tmp_path / "a.pack.partial")

    def open_then_rename(*args: Any) -> int:
        fd = opened(*args)
        (tmp_path / "a.pack.partial").rename(path)
        return fd

    monkeypatch.setattr(pack_writer.os, "open", open_then_rename)
    header = header_of(stores, [SourceFile("model.safetensors", 3, 4, "5")])
    with pytest.raises(ConfigError, match="another process is writing"):
        write_pack(path, header, stores)
    assert path.read_bytes() == whole


def test_a_checkpoint_that_changes_meanwhile_leaves_no_pack(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    source.write_bytes(b"\2\0\0\0\0\0\0\0{}")
    stores = make_stores()
    header = header_of(stores, [SourceFile.of(source)])
    with pytest.raises(CheckpointError, match=r"changed since it was packed: model\.safetensors"):
        write_pack(
            tmp_path / "a.pack",
            header,
            stores,
            files=[source],
            after_each=lambda n: source.write_bytes(b"\2\0\0\0\0\0\0\0{} "),
        )
    assert list(tmp_path.iterdir()) == [source]


def test_a_changed_checkpoint_is_told_by_size_header_and_time(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    source.write_bytes(b"\2\0\0\0\0\0\0\0{}1234")
    status = source.stat()
    header = header_of(make_stores(), [SourceFile.of(source)])
    check_sources(Path("p"), header.sources, [source])
    for content, seconds, message in (
        (b"\2\0\0\0\0\0\0\0{}12345", 0, "had 14 bytes, has 15"),
        (b"\2\0\0\0\0\0\0\0[]1234", 0, "has another header"),
        (b"\2\0\0\0\0\0\0\0{}1235", 1, "was written to"),
    ):
        source.write_bytes(content)
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns + seconds * 10**9))
        with pytest.raises(CheckpointError, match=rf"model.safetensors {message}.*hotexperts pack"):
            check_sources(Path("p"), header.sources, [source])
    more = tmp_path / "more.safetensors"
    more.write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is gone"):
        check_sources(Path("p"), header.sources, [])
    source.write_bytes(b"\2\0\0\0\0\0\0\0{}1234")
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CheckpointError, match=r"more\.safetensors is new"):
        check_sources(Path("p"), header.sources, [source, more])


def test_damaged_files_are_refused_when_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.pack"
    make_pack(path)
    whole = path.read_bytes()
    for content, message in (
        (whole[:-4096], "has 81920 bytes?.*truncated"),
        (whole + b"x", "truncated, or was changed"),
        (whole[:100], "damaged header"),
        (b"", "no pack"),
        (b"PK" + whole[2:], "no pack"),
        (whole[:40] + b"?" + whole[41:], "damaged header"),
    ):
        path.write_bytes(content)
        if message.startswith("has"):
            message = f"has {len(content)} bytes.*truncated"
        with pytest.raises(CheckpointError, match=rf"a\.pack: .*{message}.*hotexperts pack"):
            PackFile(path)
    with pytest.raises(StorageError, match=r"none: cannot be read \(No such file"):
        PackFile(tmp_path / "none")


def test_a_header_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pack"
    layer = b'{"layers": [[%s, %s, [[%s, [%s], "%s"]]]], "sources": [[%s, 3, 4, "5"]]}'
    right = (b'"a"', b"1", b'"w"', b"1", b"int8", b'"m"')
    wrong = (b"[]", b"null", b"{}", b"-1", b"no_dtype", b"[]")
    texts = [b"[]", b"{", b"[" * 100_000]
    texts += [layer % (*right[:i], wrong[i], *right[i + 1 :]) for i in range(6)]
    texts += [layer % (*right[:1], count, *right[2:]) for count in (b"0", b"1.5", b"true", b'"2"')]
    for text in texts:
        path.write_bytes(struct.pack("<8sQI", b"HXPACK01", len(text), zlib.crc32(text)) + text)
        with pytest.raises(CheckpointError, match="another version"):
            PackFile(path)


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pack"
    make_pack(path)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StorageError, match=r"a\.pack: cannot be read \(Permission denied\)"):
        PackFile(path)


@pytest.mark.parametrize("refusal", ["open", "read"])
def test_a_file_system_without_direct_reads_is_read_and_said(
    refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pack"
    stores = make_pack(path)
    opened, direct, preadv = os.open, set[int](), os.preadv

    def may_open(name: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT and refusal == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fd = opened(name, flags, *rest)
        direct.discard(fd)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def may_read(fd: int, buffers: Any, offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "open", may_open)
    monkeypatch.setattr(os, "preadv", may_read)
    pack = PackFile(path)
    assert pack.reason == "its file system has no direct reads"
    store, tensors = disk.DiskBackingStore(pack, 0, 3), blank(stores[0])
    store.copy_into(5, tensors)
    assert equal(tensors, stores[0], 5)


@pytest.mark.parametrize("fault", ["eio", "short", "garbage"])
def test_a_read_that_fails_once_is_tried_again(fault: str, tmp_path: Path) -> None:
    stores = make_pack(tmp_path / "a.pack")
    pack = PackFile(tmp_path / "a.pack", preadv=failing(lambda n: fault if n == 0 else None))
    store, tensors = disk.DiskBackingStore(pack, 0, 3), blank(stores[0])
    store.copy_into(2, tensors)
    assert equal(tensors, stores[0], 2)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("eio", StorageError, r"expert 2 of layers.0 cannot be read \(Input/output error"),
        ("short", StorageError, "expert 2 of layers.0: the disk gave 4096 of 8192 bytes"),
        ("garbage", CheckpointError, "the row of expert 2 of layers.0 is damaged"),
    ],
)
def test_a_read_that_fails_twice_stops_and_leaves_nothing_behind(
    fault: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    stores = make_pack(tmp_path / "a.pack")
    pack = PackFile(tmp_path / "a.pack", preadv=failing(lambda n: fault if n < 2 else None))
    store, tensors = disk.DiskBackingStore(pack, 0, 3), blank(stores[0])
    with pytest.raises(error, match=message):
        store.copy_into(2, tensors)
    assert all(bool((tensor == 99).all()) for tensor in tensors), "the bytes went nowhere"
    assert store.residency.slot_of == [-1] * NUM_EXPERTS
    store.copy_into(2, tensors)  # the third read is good
    assert equal(tensors, stores[0], 2)


def test_a_flipped_bit_names_its_row_and_spares_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.pack"
    stores = make_pack(path)
    flip(path, header_of(stores).place(1, 3).offset + 100)
    store = disk.DiskBackingStore(PackFile(path), 1, NUM_EXPERTS)
    store.expect(range(NUM_EXPERTS))
    for expert in range(NUM_EXPERTS):
        tensors = blank(stores[1])
        if expert == 3:
            named = re.escape(str(path)) + ": the row of expert 3 of layers.1 is damaged"
            with pytest.raises(CheckpointError, match=named):
                store.copy_into(expert, tensors)
            assert all(bool((tensor == 99).all()) for tensor in tensors)
        else:
            store.copy_into(expert, tensors)
            assert equal(tensors, stores[1], expert)
