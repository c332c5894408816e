"""A pack: every expert's row of a model in one file, as a disk reads it best.

Format: a header (8 bytes of magic, the length and the CRC-32 of a JSON text, the text), a table of
one number a row, then the rows, layer by layer. Header, table and rows each begin at a multiple of
4096 bytes, so that reads may bypass the page cache. The number of a row is 2^32 plus the CRC-32 of
its bytes; 0 where it is not written yet.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hotexperts.cache.pack_source import MAKE_AGAIN, MOST_HEADER_BYTES, SourceFile
from hotexperts.errors import CheckpointError, StorageError
from hotexperts.formats import ExpertLayout, TensorSpec
from hotexperts.plain_file import plain

ALIGNMENT = 4096  # bytes; what direct reads ask of offsets, lengths and addresses
WRITTEN = 1 << 32
_PREFIX = struct.Struct("<8sQI")
MAGIC = b"HXPACK01"
MOVE = "copy the pack to another disk, or make it again with `hotexperts pack`"


class PackedLayer(NamedTuple):
    """One layer in a pack.

    Attributes:
        name: its path in the model.
        num_experts: its rows.
        layout: what a row holds.
    """

    name: str
    num_experts: int
    layout: ExpertLayout

    @property
    def row_stride(self) -> int:
        """Bytes from row to row: the row's, rounded up to whole blocks."""
        return aligned(self.layout.row_nbytes)


class RowPlace(NamedTuple):
    """Where a row lies: its number in the file, bytes from the file's start, and its bytes."""

    number: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class PackHeader:
    """What is in a pack, and of which checkpoint.

    Attributes:
        layers: in the model's order.
        sources: the checkpoint's files.
        quantisation: a digest of what says how their bytes are read; None where they are numbers.
    """

    layers: tuple[PackedLayer, ...]
    sources: tuple[SourceFile, ...]
    quantisation: str | None = None

    @classmethod
    def read(cls, path: Path) -> PackHeader:
        """The header of a file, which is as long as it says.

        Raises:
            CheckpointError: it is no pack, or a damaged or truncated one.
            StorageError: it cannot be read.
        """
        try:
            with plain(path).open("rb") as file:
                prefix = file.read(_PREFIX.size)
                magic, length, checksum = _PREFIX.unpack(prefix.ljust(_PREFIX.size, b"\0"))
                if magic != MAGIC or length > MOST_HEADER_BYTES:
                    raise CheckpointError(f"{path}: no pack of experts: {MAKE_AGAIN}")
                text = file.read(length)
                size = path.stat().st_size
        except OSError as error:
            raise cannot_read(path, error) from error
        if zlib.crc32(text) != checksum:
            raise CheckpointError(f"{path}: damaged header: {MAKE_AGAIN}")
        header = cls._parsed(path, text)
        if size != header.nbytes:
            raise CheckpointError(
                f"{path}: has {size} bytes, its header says {header.nbytes}: it is truncated, or "
                f"was changed: {MAKE_AGAIN}"
            )
        return header

    @cached_property
    def encoded(self) -> bytes:
        """The bytes before the table."""
        layers = [
            [name, count, [[s.name, list(s.shape), _dtype_name(s.dtype)] for s in layout.specs]]
            for name, count, layout in self.layers
        ]
        values: dict[str, Any] = {"layers": layers, "sources": self.sources}
        if self.quantisation is not None:  # so that others' packs are as they always were
            values["quantisation"] = self.quantisation
        text = json.dumps(values).encode()
        found = _PREFIX.pack(MAGIC, len(text), zlib.crc32(text)) + text
        return found.ljust(aligned(len(found)), b"\0")

    @property
    def num_rows(self) -> int:
        """Of all layers."""
        return sum(layer.num_experts for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        rows = sum(layer.num_experts * layer.row_stride for layer in self.layers)
        return self._rows_begin + rows

    def table_place(self, number: int = 0) -> int:
        """Bytes from the file's start to the table's entry of a row."""
        return len(self.encoded) + 8 * number

    def place(self, layer: int, expert: int) -> RowPlace:
        """Where an expert's row lies; layers are counted from 0."""
        stride = self.layers[layer].row_stride
        number, begin = self._begins[layer]
        return RowPlace(number + expert, begin + expert * stride, stride)

    @cached_property
    def _rows_begin(self) -> int:
        return aligned(len(self.encoded) + 8 * self.num_rows)

    @cached_property
    def _begins(self) -> list[tuple[int, int]]:
        """Number and offset of each layer's first row."""
        found, number, begin = [], 0, self._rows_begin
        for layer in self.layers:
            found.append((number, begin))
            number += layer.num_experts
            begin += layer.num_experts * layer.row_stride
        return found

    @classmethod
    def _parsed(cls, path: Path, text: bytes) -> PackHeader:
        try:
            values = json.loads(text)
            layers = [
                PackedLayer(
                    _text(name), _count(count, 1), ExpertLayout(tuple(_spec(*s) for s in specs))
                )
                for name, count, specs in values["layers"]
            ]
            sources = [SourceFile(_text(name), *rest) for name, *rest in values["sources"]]
            found = values.get("quantisation")
            quantisation = None if found is None else _text(found)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: written by another version: {MAKE_AGAIN}") from error
        return cls(tuple(layers), tuple(sources), quantisation)


def is_pack(path: Path) -> bool:
    """Whether a file begins like a pack, however damaged.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        with plain(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise cannot_read(path, error) from error


def aligned(num_bytes: int) -> int:
    """Rounded up to whole blocks."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def cannot_read(path: Path, error: OSError) -> StorageError:
    """What to say of a pack that the system does not let us read."""
    return StorageError(
        f"{path}: cannot be read ({error.strerror}): give it permissions, or {MAKE_AGAIN}"
    )


def damaged_row(path: Path, layer: PackedLayer, expert: int) -> CheckpointError:
    """What to say of a row whose bytes are not those that were written."""
    return CheckpointError(
        f"{path}: the row of expert {expert} of {layer.name} is damaged (its checksum differs, "
        f"read twice): {MAKE_AGAIN}"
    )


def _spec(name: str, shape: list[int], dtype: str) -> TensorSpec:
    found: Any = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise ValueError(dtype)
    return TensorSpec(_text(name), tuple(_count(size) for size in shape), found)


def _count(value: Any, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(value)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
