"""Files that other readers accept are accepted, and those that nobody can read are named."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hotexperts.cache import host_memory
from hotexperts.cache.host_memory import HostBuffer
from hotexperts.cache.safetensors_file import SafetensorsFile
from hotexperts.errors import CheckpointError


def write_header(path: Path, header: object, num_data_bytes: int = 0) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + num_data_bytes)
    return path


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("U16", torch.uint16),
        ("U32", torch.uint32),
        ("U64", torch.uint64),
        ("C64", torch.complex64),
        ("F8_E4M3FNUZ", torch.float8_e4m3fnuz),
        ("F8_E5M2FNUZ", torch.float8_e5m2fnuz),
    ],
)
def test_every_dtype_that_torch_has_is_read(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    size = 3 * dtype.itemsize
    entry = {"dtype": name, "shape": [3], "data_offsets": [0, size]}
    tensor = SafetensorsFile(write_header(tmp_path / "m", {"w": entry}, size)).tensor("w")
    assert (tensor.dtype, tensor.shape) == (dtype, (3,))


def test_a_dtype_that_torch_lacks_matters_only_where_it_is_read(tmp_path: Path) -> None:
    strange = {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}
    plain = {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]}
    path = write_header(tmp_path / "m.safetensors", {"strange": strange, "plain": plain}, 5)
    file = SafetensorsFile(path)
    assert file.tensor("plain").tolist() == [0, 0]
    with pytest.raises(CheckpointError, match=r"m\.safetensors: tensor 'strange'.*'F6_E2M3'"):
        file.tensor("strange")


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"[" * 200_000, id="depth"),
        pytest.param(b'{"w": ' + b"9" * 5000 + b"}", id="digits"),
    ],
)
def test_a_header_that_python_cannot_take_is_named(header: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"bad\.safetensors: corrupt header"):
        SafetensorsFile(write_header(tmp_path / "bad.safetensors", header))


def test_an_endless_size_is_named(tmp_path: Path) -> None:
    header = b'{"w": {"dtype": "U8", "shape": [Infinity], "data_offsets": [0, 1]}}'
    with pytest.raises(CheckpointError, match="cannot be understood"):
        SafetensorsFile(write_header(tmp_path / "bad.safetensors", header, 1))


def test_a_file_larger_than_the_memory_is_mapped(tmp_path: Path) -> None:
    """A hole in the file stands for the bytes: the system must not promise memory for them."""
    size = 2 * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    try:
        path = write_header(tmp_path / "m.safetensors", {"w": entry}, size)
    except OSError:
        pytest.skip("the file system takes no file as large")
    file = SafetensorsFile(path)
    last = file.tensor("w")[-3:]
    file.release("w")
    del file  # a view keeps the mapping
    assert last.tolist() == [0, 0, 0]


def test_a_kernel_without_huge_pages_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pages(mmap.mmap):
        def madvise(self, option: int, *range_: int) -> None:
            raise OSError(22, "Invalid argument")

    class Module:
        mmap = Pages

        def __getattr__(self, name: str) -> Any:
            return getattr(mmap, name)

    monkeypatch.setattr(host_memory, "mmap", Module())
    assert HostBuffer(4096, pin=False).bytes.tolist() == [0] * 4096
