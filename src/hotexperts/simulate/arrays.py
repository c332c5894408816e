"""Traces in `.npz` files: `ids[token, layer, slot]`, or `ids[sequence, position, layer, k]`.

Guesses lie beside them in arrays of the same layout, by the layer that they are about; in the
layout by sequence, and there only, by the layer that they were made in, without the last one.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotexperts.simulate.trace import DECODE, MAX_CELLS, NOT_RECORDED, PREFILL, Trace, TraceError

GUESSES = {"guesses": "output", "guesses_input": "input"}  # by token; to their taps
NEXT_LAYER = {"next_layer_from_output": "output", "next_layer_from_moe_input": "input"}
_MOST_NBYTES = 8 * MAX_CELLS + (1 << 20)  # of one array: ids of 64 bits
FIRST_DECODE_POSITION = 128  # of the layout by sequence and position
NAMES = ("ids", "phase", "seq", "meta")
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
    """The trace in an `.npz` file; arrays that docs/traces.md does not name are not read."""
    arrays = _load(path)
    ids = _without_sentinel(_need(arrays, "ids"))
    meta = _meta(arrays)
    if ids.ndim == 4:
        return _by_sequence(ids, meta, arrays)
    guesses = {tap: _without_sentinel(arrays[a]) for a, tap in GUESSES.items() if a in arrays}
    return Trace(ids, _need(arrays, "phase"), _need(arrays, "seq"), meta, guesses)


def write_npz(trace: Trace, path: Path) -> None:
    """Write the layout by token, in the smallest ids that hold the experts."""
    highest = max(int(array.max()) for array in (trace.ids, *trace.guesses.values()))
    kind = np.uint8 if highest < np.iinfo(np.uint8).max else np.uint16
    arrays: dict[str, Any] = {"ids": trace.ids}
    arrays |= {name: trace.guesses[tap] for name, tap in GUESSES.items() if tap in trace.guesses}
    for name, array in arrays.items():
        arrays[name] = np.where(array == NOT_RECORDED, np.iinfo(kind).max, array).astype(kind)
    phase = trace.phase.astype(np.uint8)
    arrays["phase"], arrays["seq"] = phase, trace.seq
    arrays["meta"] = np.array(json.dumps(dict(trace.meta)))
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _load(path: Path) -> Arrays:
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                raise TraceError("one bare array: give an .npz with 'ids', 'phase' and 'seq'")
            wanted = (*NAMES, *GUESSES, *NEXT_LAYER)
            for entry in found.zip.infolist():
                if entry.file_size > _MOST_NBYTES and entry.filename.removesuffix(".npy") in wanted:
                    raise TraceError(
                        f"{entry.filename} takes {entry.file_size} bytes unpacked, over the "
                        f"{_MOST_NBYTES} of the largest trace: give fewer tokens"
                    )
            return {name: found[name] for name in wanted if name in found}
    except UNREADABLE as error:
        if isinstance(error, TraceError):
            raise
        why = "no archive of plain arrays" if "pickle" in str(error) else error
        raise TraceError(f"cannot be read as .npz ({why}): give the whole file") from error


def _need(arrays: Arrays, name: str) -> npt.NDArray[Any]:
    if name not in arrays:
        raise TraceError(f"array {name!r} is missing: give it beside {sorted(arrays)}")
    return arrays[name]


def _without_sentinel(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if ids.dtype not in (np.uint8, np.uint16):
        return ids
    wide = ids.astype(np.int32)
    wide[ids == np.iinfo(ids.dtype).max] = NOT_RECORDED
    return wide


def _by_sequence(ids: npt.NDArray[Any], meta: dict[str, Any], arrays: Arrays) -> Trace:
    num_sequences, num_positions = ids.shape[:2]
    position = np.tile(np.arange(num_positions), num_sequences)
    phase = np.where(position >= FIRST_DECODE_POSITION, DECODE, PREFILL)
    seq = np.repeat(np.arange(num_sequences), num_positions)
    guesses = {tap: _of_next(arrays[a], a, ids) for a, tap in NEXT_LAYER.items() if a in arrays}
    return Trace(_flat(ids), phase, seq, meta, guesses)


def _of_next(made_in: npt.NDArray[Any], name: str, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Guesses by the layer that they are about, of which the first has none."""
    sequences, positions, layers = ids.shape[:3]
    if made_in.shape[:-1] != (sequences, positions, layers - 1):
        raise TraceError(
            f"array {name!r}: shape {made_in.shape}: give [{sequences}, {positions}, {layers - 1}, "
            "n], one row for each layer but the last"
        )
    none = np.full((sequences, positions, 1, made_in.shape[3]), NOT_RECORDED)
    return _flat(np.concatenate([none, _without_sentinel(made_in)], axis=2))


def _flat(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.reshape(-1, *array.shape[2:])


def _meta(arrays: Arrays) -> dict[str, Any]:
    if "meta" not in arrays:
        return {}
    try:
        meta = json.loads(str(arrays["meta"]))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"array 'meta': not JSON ({error}): give a JSON object") from error
    if not isinstance(meta, dict):
        raise TraceError("array 'meta': give a JSON object")
    return meta
