"""Trace files by the end of their name."""

from __future__ import annotations

import os
from pathlib import Path

from hotexperts.plain_file import other_than_file, plain
from hotexperts.simulate.arrays import read_npz, write_npz
from hotexperts.simulate.lines import read_csv, read_jsonl, write_jsonl
from hotexperts.simulate.trace import Trace, TraceError

READERS = {".npz": read_npz, ".jsonl": read_jsonl, ".csv": read_csv}
WRITERS = {".npz": write_npz, ".jsonl": write_jsonl}


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace: `.npz` in either layout, `.jsonl` or `.csv` (see docs/traces.md).

    Raises:
        TraceError: the file cannot be read or is malformed; the message names file and place.
    """
    path = Path(path)
    try:
        reader = READERS.get(path.suffix)
        if reader is None:
            raise TraceError(f"unknown kind: give a file that ends in one of {', '.join(READERS)}")
        return reader(plain(path))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    except OSError as error:  # of `plain`: a reader's are errors of its own
        raise TraceError(f"{path}: {error.strerror}: give the trace in a file") from error


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace as `.npz` (by token) or `.jsonl`, replacing what is there.

    CSV is only read: it has no place for sequences and phases. Guesses have one in `.npz` alone.

    Raises:
        TraceError: another kind of file, one that would lose the trace's guesses, or no file.
    """
    path = Path(path)
    writer = WRITERS.get(path.suffix)
    if writer is None:
        raise TraceError(f"{path}: cannot write this kind: end it in {' or '.join(WRITERS)}")
    if trace.guesses and path.suffix != ".npz":
        raise TraceError(f"{path}: no place for the trace's guesses: end the name in .npz")
    if (kind := other_than_file(path)) is not None:
        raise TraceError(f"{path}: {kind} is there: name a file")
    writer(trace, path)
