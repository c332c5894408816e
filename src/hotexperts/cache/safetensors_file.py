"""One safetensors file, memory-mapped: tensors are views of the file, nothing is copied.

The header is parsed here, and not by the safetensors package, for three things that package does
not give: pages that can be handed back to the system after reading, errors that name the file and
the fault before any weight is touched, and sizes without opening tensors.
Format: an 8-byte little-endian header length, a JSON header, then the data.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hotexperts.errors import CheckpointError

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class TensorEntry(NamedTuple):
    """Where a tensor lies in the file; `begin` and `end` in bytes from the file's start.

    The dtype is the file's name for it where torch has none: such a tensor cannot be read.
    """

    dtype: torch.dtype | str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A checked, memory-mapped file.

    Attributes:
        path: the file.
        entries: tensor name to its place.

    Raises:
        CheckpointError: missing, truncated or corrupt.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # Read-only: the system promises memory for every page that may be written.
                self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}): download it again") from error
        self._bytes = _as_tensor(self._pages)
        header, data_begin = self._read_header()
        self.entries = {
            name: self._entry(name, value, data_begin)
            for name, value in header.items()
            if name != "__metadata__"
        }

    def tensor(self, name: str) -> torch.Tensor:
        """A view of one tensor in the mapping; writing to it ends the process.

        Raises:
            CheckpointError: the file has no such tensor, or its dtype is not torch's.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        if isinstance(entry.dtype, str):
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has the dtype {entry.dtype!r}, which torch does "
                "not have: convert the checkpoint"
            )
        if math.prod(entry.shape) == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        flat = self._bytes[entry.begin : entry.end]
        if entry.begin % entry.dtype.itemsize:  # the format allows it, torch does not
            flat = flat.clone()
        return flat.view(entry.dtype).view(entry.shape)

    def release(self, name: str) -> None:
        """Hand the pages of one tensor back to the system; reading it again reads the file."""
        entry = self.entries[name]
        begin = -(-entry.begin // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages inside the tensor
        end = entry.end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self._pages.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size = len(self._pages)
        length = int.from_bytes(self._pages[:8], "little")
        if size < 8 or length > _MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(
                f"{self.path}: truncated or not safetensors ({size} bytes, the header alone "
                f"claims {length}): download it again"
            )
        try:
            header = json.loads(self._pages[8 : 8 + length])
            if not isinstance(header, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self.path}: corrupt header ({error}): download it again"
            ) from error
        return header, 8 + length

    def _entry(self, name: str, value: Any, data_begin: int) -> TensorEntry:
        try:
            dtype = _DTYPES.get(value["dtype"], str(value["dtype"]))
            shape = tuple(int(size) for size in value["shape"])
            begin, end = (data_begin + int(offset) for offset in value["data_offsets"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has a header that cannot be understood ({error!r})"
            ) from error
        if end > len(self._pages):
            raise CheckpointError(
                f"{self.path}: truncated: tensor {name!r} ends at byte {end}, the file has "
                f"{len(self._pages)}: download it again"
            )
        negative = min(shape, default=0) < 0 or begin < data_begin
        known = isinstance(dtype, torch.dtype)
        wanted = math.prod(shape) * dtype.itemsize if known else end - begin
        if negative or end < begin or end - begin != wanted:
            raise CheckpointError(
                f"{self.path}: corrupt: tensor {name!r} of shape {list(shape)} has "
                f"{end - begin} bytes: download it again"
            )
        return TensorEntry(dtype, shape, begin, end)


def _as_tensor(pages: mmap.mmap) -> torch.Tensor:
    """The mapping as uint8; it stays mapped while a view of the tensor lives.

    `torch.frombuffer` warns about read-only memory, and a filter would hide that from other
    threads' code too; a ctypes array over the same address is not read-only for it.
    """
    view = np.frombuffer(pages, dtype=np.uint8)
    array = (ctypes.c_uint8 * len(pages)).from_address(view.ctypes.data)
    array.keeps_mapped = view  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)
