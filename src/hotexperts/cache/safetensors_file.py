"""One safetensors file, memory-mapped: tensors are views of the file, nothing is copied.

The package of that name is not used, for two things it does not give: pages that can be handed
back to the system after reading, and errors that name the file and the fault before any weight is
touched.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch

from hotexperts.cache.mapped_file import MappedFile
from hotexperts.errors import CheckpointError
from hotexperts.safetensors_header import read_header

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
        self._mapped = MappedFile(path)
        self.entries = {
            name: TensorEntry(_DTYPES.get(place.dtype, place.dtype), *place[1:])
            for name, place in read_header(path).items()
        }

    def tensor(self, name: str) -> torch.Tensor:
        """A view of one tensor in the mapping; writing to it ends the process.

        Raises:
            CheckpointError: the file has no such tensor, or its dtype is not torch's.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}: download it again")
        if isinstance(entry.dtype, str):
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has the dtype {entry.dtype!r}, which torch does "
                "not have: convert the checkpoint"
            )
        if math.prod(entry.shape) == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        # The format allows tensors that are not aligned.
        return self._mapped.view(entry.begin, entry.end, entry.dtype).view(entry.shape)

    def release(self, name: str) -> None:
        """Hand the pages of one tensor back to the system; reading it again reads the file."""
        entry = self.entries[name]
        self._mapped.release(entry.begin, entry.end)
