"""Traces in `.npz` files: `ids[token, layer, slot]`, or `ids[sequence, position, layer, k]`."""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotexperts.simulate.trace import DECODE, MAX_CELLS, NOT_RECORDED, PREFILL, Trace, TraceError

ARRAYS = ("ids", "phase", "seq", "meta")
_MOST_NBYTES = 8 * MAX_CELLS + (1 << 20)  # of one of them: ids of 64 bits
FIRST_DECODE_POSITION = 128  # of the layout by sequence and position
UNREADABLE = (  # what numpy and zipfile raise over bytes that are no archive
    ValueError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)

Arrays = dict[str, npt.NDArray[Any]]


def read_npz(path: Path) -> Trace:
    """The trace in an `.npz` file; arrays other than ids, phase, seq and meta are not read."""
    arrays = _load(path)
    ids = _without_sentinel(_need(arrays, "ids"))
    meta = _meta(arrays)
    if ids.ndim == 4:
        return _by_sequence(ids, meta)
    return Trace(ids, _need(arrays, "phase"), _need(arrays, "seq"), meta)


def write_npz(trace: Trace, path: Path) -> None:
    """Write the layout by token, in the smallest ids that hold the experts."""
    kind = np.uint8 if trace.ids.max() < np.iinfo(np.uint8).max else np.uint16
    ids = np.where(trace.ids == NOT_RECORDED, np.iinfo(kind).max, trace.ids).astype(kind)
    phase = trace.phase.astype(np.uint8)
    meta = np.array(json.dumps(dict(trace.meta)))
    with path.open("wb") as file:
        np.savez_compressed(file, ids=ids, phase=phase, seq=trace.seq, meta=meta)


def _load(path: Path) -> Arrays:
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                raise TraceError("one bare array: give an .npz with 'ids', 'phase' and 'seq'")
            for entry in found.zip.infolist():
                if entry.file_size > _MOST_NBYTES and entry.filename.removesuffix(".npy") in ARRAYS:
                    raise TraceError(f"{entry.filename} takes {entry.file_size} bytes unpacked")
            return {name: found[name] for name in ARRAYS if name in found}
    except UNREADABLE as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"cannot be read as .npz: {error}") from error


def _need(arrays: Arrays, name: str) -> npt.NDArray[Any]:
    if name not in arrays:
        raise TraceError(f"array {name!r} is missing: the file holds {sorted(arrays)}")
    return arrays[name]


def _without_sentinel(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if ids.dtype not in (np.uint8, np.uint16):
        return ids
    wide = ids.astype(np.int32)
    wide[ids == np.iinfo(ids.dtype).max] = NOT_RECORDED
    return wide


def _by_sequence(ids: npt.NDArray[Any], meta: dict[str, Any]) -> Trace:
    num_sequences, num_positions = ids.shape[:2]
    position = np.tile(np.arange(num_positions), num_sequences)
    phase = np.where(position >= FIRST_DECODE_POSITION, DECODE, PREFILL)
    seq = np.repeat(np.arange(num_sequences), num_positions)
    return Trace(ids.reshape(num_sequences * num_positions, *ids.shape[2:]), phase, seq, meta)


def _meta(arrays: Arrays) -> dict[str, Any]:
    if "meta" not in arrays:
        return {}
    try:
        meta = json.loads(str(arrays["meta"]))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"array 'meta': not JSON: {error}") from error
    if not isinstance(meta, dict):
        raise TraceError("array 'meta': give a JSON object")
    return meta
