"""The header of a safetensors file, checked: where each tensor lies, without reading any.

Format: an 8-byte little-endian header length, a JSON header, then the data.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from hotexperts.errors import CheckpointError
from hotexperts.plain_file import plain

_MOST_BYTES = 100_000_000  # the format's own limit
_MOST_DIMENSIONS = 64
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class TensorPlace(NamedTuple):
    """Where a tensor lies.

    Attributes:
        dtype: the file's name for it; any text, as new ones come.
        shape: of the tensor.
        begin: bytes from the file's start.
        end: the same; the tensor has what is between.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorPlace]:
    """The places of a file's tensors.

    Raises:
        CheckpointError: missing, truncated or corrupt.
    """
    try:
        with plain(path).open("rb") as file:
            size = path.stat().st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > _MOST_BYTES or 8 + length > size:
                raise CheckpointError(
                    f"{path}: truncated or not safetensors ({size} bytes, the header alone "
                    f"claims {length}): download it again"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}): download it again") from error
    return {
        name: checked_place(str(path), name, value, 8 + length, size)
        for name, value in _parsed(path, text).items()
        if name != "__metadata__"
    }


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: corrupt header ({error}): download it again") from error
    return header


def checked_place(
    file: str, name: str, value: Any, data_begin: int, file_nbytes: int | None
) -> TensorPlace:
    """One tensor's place.

    Args:
        file: named in errors.
        name: the tensor's.
        value: what the header has under it.
        data_begin: where the header ends, in bytes.
        file_nbytes: None where nobody knows.

    Raises:
        CheckpointError: it is none, or beyond the file's end.
    """
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype: Any = fields.get("dtype")
    shape, offsets = _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise CheckpointError(
            f"{file}: tensor {name[:80]!r} has a header that cannot be understood ({value!r:.80}): "
            "download it again"
        )
    begin, end = (data_begin + offset for offset in offsets)
    if file_nbytes is not None and end > file_nbytes:
        raise CheckpointError(
            f"{file}: truncated: tensor {name[:80]!r} ends at byte {end}, the file has "
            f"{file_nbytes}: download it again"
        )
    bits = _BITS.get(dtype)
    if end < begin or (bits is not None and 8 * (end - begin) != math.prod(shape) * bits):
        raise CheckpointError(
            f"{file}: corrupt: tensor {name[:80]!r} of shape {list(shape)!r:.80} has "
            f"{end - begin} bytes: download it again"
        )
    return TensorPlace(dtype, shape, begin, end)


def _counts(values: Any) -> tuple[int, ...] | None:
    """A few whole numbers; None for anything else."""
    if not isinstance(values, list) or len(values) > _MOST_DIMENSIONS:
        return None
    are_counts = all(type(value) is int and 0 <= value < 2**63 for value in values)
    return tuple(values) if are_counts else None
