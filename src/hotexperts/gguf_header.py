"""The headers of GGUF files, read by the `gguf` package: it maps a file, and no tensor is touched.

A file may be split: `NAME-00001-of-00003.gguf` and so on; the first says what the model is.
"""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hotexperts.errors import CheckpointError
from hotexperts.plain_file import plain

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL | re.ASCII)
_MOST_FILES = 1000
_MOST_ITEMS = 1 << 22  # of a list: the largest vocabularies have 300,000 words
_MOST_READS = 1 << 21  # of a header: seven a tensor or so


def parts_of(path: Path) -> list[Path]:
    """All files of a model, in order.

    Args:
        path: of the file, or of any part of a split one.

    Raises:
        CheckpointError: a part is missing, or the name is that of none.
    """
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    stem, count = found[1], int(found[3])
    if not 1 <= int(found[2]) <= count <= _MOST_FILES:
        raise CheckpointError(
            f"{path}: no part of a split file has such a name: give the first, named as it was"
        )
    parts = [path.with_name(f"{stem}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of {count} parts, {missing[0]} first: "
            "download the rest"
        )
    return parts


def read_headers(path: Path) -> list[Any]:
    """A `GGUFReader` of each part of a model, in order.

    Raises:
        CheckpointError: see `parts_of` and `read_header`, or two tensors have one name.
        ModuleNotFoundError: the package is not installed.
    """
    headers = [read_header(part) for part in parts_of(path)]
    names: set[str] = set()
    for tensor in (tensor for header in headers for tensor in header.tensors):
        if tensor.name in names:
            raise CheckpointError(
                f"{path}: damaged (two tensors are called {tensor.name:.80}): download it again"
            )
        names.add(tensor.name)
    return headers


def read_header(path: Path) -> Any:
    """A `GGUFReader` of one file, whose lists are one part each.

    Raises:
        CheckpointError: missing, truncated or damaged.
        ModuleNotFoundError: the package is not installed.
    """
    try:
        from gguf import GGUFReader, GGUFValueType
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}: it reads GGUF: pip install -e '.[gguf]' in the source folder",
            name=error.name,
        ) from error

    class Reader(GGUFReader):  # type: ignore[misc]
        """Refuses what lies beyond the file's end, where the package would go on with nothing.

        Lists become one part: the package makes an array of each word of a vocabulary, which
        takes it twenty seconds and a gigabyte.
        """

        num_reads = 0

        def _get_field_parts(self, start: int, kind: int) -> Any:
            if kind != GGUFValueType.ARRAY:
                return super()._get_field_parts(start, kind)
            item_kind, count = self._get(start, "u4"), self._get(start + 4, "u8")
            item, number = GGUFValueType(item_kind[0]), int(count[0])
            if number > _MOST_ITEMS:
                raise ValueError(f"a list of {number} items")
            dtype = self.gguf_scalar_to_np.get(item)
            if dtype is not None:
                values = self._get(start + 12, dtype, number)
            elif item == GGUFValueType.STRING:
                order = ">" if (self.byte_order == "S") == (sys.byteorder == "little") else "<"
                size = _texts_nbytes(self.data, start + 12, number, order + "Q")
                values = self._get(start + 12, "u1", size)
            else:
                raise ValueError(f"a list of {item.name}")
            parts = [item_kind, count, values]
            return sum(part.nbytes for part in parts), parts, [2], [GGUFValueType.ARRAY, item]

        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **more: Any) -> Any:
            self.num_reads += 1
            if self.num_reads > _MOST_READS:
                raise ValueError("its header has no end")
            wanted = int(count)
            found = super()._get(offset, dtype, count, *rest, **more)
            if len(found) != wanted:
                raise ValueError(f"it ends before byte {offset + wanted}")
            return found

    try:
        with np.errstate(over="raise"):
            return Reader(plain(path))
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}: name a file that can be read"
        ) from error
    except (ValueError, LookupError, TypeError, ArithmeticError, struct.error) as error:
        raise CheckpointError(
            f"{path}: damaged or not GGUF ({error!r:.120}): download it again"
        ) from error


def _texts_nbytes(data: Any, start: int, count: int, length_format: str) -> int:
    """Bytes of so many texts, each with its length before it."""
    end, view = start, memoryview(data)
    for _ in range(count):
        (length,) = struct.unpack_from(length_format, view, end)
        end += 8 + length
    return end - start


def value(header: Any, key: str) -> Any:
    """What a header says under a key; None where it says nothing."""
    found = header.get_field(key)
    return None if found is None else found.contents()
