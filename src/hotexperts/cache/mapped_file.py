"""A file as the system maps it: its bytes as a tensor, whose pages can be handed back."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import torch

from hotexperts.errors import CheckpointError
from hotexperts.plain_file import plain


class MappedFile:
    """A file's bytes.

    Attributes:
        path: the file.
        bytes: uint8, a view of the mapping; writing to it ends the process.

    Raises:
        CheckpointError: missing or empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with plain(path).open("rb") as file:
                # Read-only: the system promises memory for every page that may be written.
                self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}): download it again") from error
        self.bytes = _as_tensor(self._pages)

    def view(self, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """The bytes from `begin` to `end` as numbers; a copy where torch cannot view them.

        Raises:
            CheckpointError: the file has become shorter: reading what is gone ends the process.
                One that is cut between this and the reading still does.
        """
        size = self._pages.size()  # one call of the system, a microsecond at most
        if size < len(self._pages):
            raise CheckpointError(
                f"{self.path}: had {len(self._pages)} bytes when it was opened, and has {size}: "
                "restore it, start anew, and leave it alone while the model runs"
            )
        flat = self.bytes[begin:end]
        if begin % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype)

    def release(self, begin: int, end: int) -> None:
        """Hand the pages between two bytes back to the system."""
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages inside
        end = end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self._pages.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _as_tensor(pages: mmap.mmap) -> torch.Tensor:
    """The mapping as uint8; it stays mapped while a view of the tensor lives.

    `torch.frombuffer` warns about read-only memory, and a filter would hide that from other
    threads' code too; a ctypes array over the same address is not read-only for it.
    """
    view = np.frombuffer(pages, dtype=np.uint8)
    array = (ctypes.c_uint8 * len(pages)).from_address(view.ctypes.data)
    array.keeps_mapped = view  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)
