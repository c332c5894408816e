"""A trace written while it is recorded: one file at the end or before it, and never half of one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from hotexperts.plain_file import other_than_file
from hotexperts.simulate.trace import MAX_CELLS, NOT_RECORDED, Trace, TraceError


class TraceWriter:
    """Appends tokens to an `.npz` by token (docs/traces.md), which appears when closed or saved.

    What is appended waits in unnamed files beside the target, not in memory. Leaving a `with` block
    closes, or, where an exception leaves it, discards.

    Args:
        path: of the file, ending in `.npz`; what is there, or where a link there leads, is
            replaced.
        num_experts: of a layer, or of the largest one.
        meta: about the recording: model, expert_nbytes, source, licence; JSON values. `n_experts`
            and `k` are added.

    Attributes:
        num_tokens: appended so far.

    Raises:
        TraceError: the file cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], num_experts: int, meta: Mapping[str, Any]
    ) -> None:
        self.num_tokens = 0
        self._num_saved = 0
        self._path = check_out(path)
        self._meta = {**meta, "n_experts": num_experts}
        self._is_closed = False
        # 255 and 65535 stand for "not recorded"
        self._id_type = np.dtype(np.uint8 if num_experts <= 255 else np.uint16)
        self._arrays: dict[str, _Spool] = {}

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def append(
        self,
        ids: npt.ArrayLike,
        phase: npt.ArrayLike,
        seq: npt.ArrayLike,
        *,
        logits: npt.ArrayLike | None = None,
        guesses: npt.ArrayLike | None = None,
    ) -> None:
        """Add one token or several in order.

        Args:
            ids: `[layer, k]` or `[token, layer, k]`, integers; -1 where nothing was recorded.
            phase: 0 prefill, 1 decode; one for all tokens, or one for each.
            seq: number of the sequence, likewise.
            logits: the router's, `[(token,) layer, expert]`, kept as float32.
            guesses: `[(token,) layer, guess]`, ids as in `ids`: in row l what is expected of layer
                l + 1 once layer l is done, the likeliest first; the last row, of no layer, is -1.

        Raises:
            TraceError: the arrays do not fit together or what came before, hold a value that means
                nothing, or make the trace longer than can be read again.
        """
        chunk = self._chunk(ids, phase, seq)
        arrays = {"ids": self._packed(chunk), "phase": chunk.phase.astype(np.uint8)}
        arrays["seq"] = chunk.seq
        if logits is not None:
            arrays["logits"] = _by_token("logits", logits, chunk).astype(np.float32)
        if guesses is not None:
            found = _by_token("guesses", guesses, chunk)
            arrays["guesses"] = self._packed(self._chunk(found, chunk.phase, chunk.seq))
        self._check(arrays)
        try:
            self._add(arrays)
        except OSError as error:
            raise _unwritable(self._path, error) from error
        self.num_tokens += len(chunk.ids)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens so far, layers and ids in each of them; zeros before the first."""
        layers, top_k = self._arrays["ids"].row_shape if self._arrays else (0, 0)
        return self.num_tokens, layers, top_k

    def close(self) -> None:
        """Write the file under another name, then give it its own; twice does no harm.

        Raises:
            TraceError: nothing was appended, or the file cannot be written; what is there stays.
        """
        if self._is_closed:
            return
        try:
            if not self.num_tokens:
                raise TraceError(
                    f"{self._path}: nothing was recorded, so nothing is written: record a prompt "
                    "of at least one token"
                )
            if self._num_saved != self.num_tokens:
                self.save()
        finally:
            self.discard()

    def save(self) -> None:
        """Write the file as if it ended here: it takes as long as the trace is.

        Another thread may append meanwhile, what it appends is not in the file; but no other may
        save, close or discard. To be called after the first token.

        Raises:
            TraceError: the file cannot be written; what is there stays.
        """
        num_tokens = self.num_tokens
        target = _behind_links(self._path)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            self._write(partial, num_tokens)
            partial.replace(target)
        except OSError as error:
            raise _unwritable(self._path, error) from error
        finally:
            partial.unlink(missing_ok=True)
        self._num_saved = num_tokens

    def discard(self) -> None:
        """Forget what was appended; a file that is there stays."""
        self._is_closed = True
        for spool in self._arrays.values():
            spool.file.close()

    def _chunk(self, ids: npt.ArrayLike, phase: npt.ArrayLike, seq: npt.ArrayLike) -> Trace:
        found = np.asarray(ids)
        if found.ndim == 2:
            found = found[None]
        tokens = found.shape[:1]
        phases, seqs = (
            np.broadcast_to(array, tokens) if np.ndim(array) == 0 else np.asarray(array)
            for array in (phase, seq)
        )
        return Trace(found, phases, seqs, {"n_experts": self._meta["n_experts"]})

    def _add(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        if not self._arrays:
            folder = _behind_links(self._path).parent
            self._arrays = {name: _Spool(folder, a) for name, a in arrays.items()}
        for name, array in arrays.items():
            self._arrays[name].add(array)

    def _packed(self, chunk: Trace) -> npt.NDArray[Any]:
        kind = self._id_type
        nobody = np.iinfo(kind).max
        return np.where(chunk.ids == NOT_RECORDED, nobody, chunk.ids).astype(kind)

    def _check(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Refuse what does not continue the tokens before it."""
        if self._is_closed:
            raise TraceError(f"{self._path}: closed: begin another file")
        given = {name: array.shape[1:] for name, array in arrays.items()}
        expected = {name: spool.row_shape for name, spool in self._arrays.items()} or given
        if given != expected:
            raise TraceError(
                f"arrays of shapes {given} a token, after tokens of {expected}: append the same "
                "for each"
            )
        num_ids = (self.num_tokens + len(arrays["ids"])) * arrays["ids"][0].size
        if num_ids > MAX_CELLS:
            raise TraceError(f"a trace of over {MAX_CELLS} ids is not read again: begin another")

    def _write(self, path: Path, num_tokens: int) -> None:
        meta = {**self._meta, "k": self.shape[2]}
        arrays: dict[str, Any] = {"meta": np.array(json.dumps(meta))}
        for name, spool in self._arrays.items():
            arrays[name] = spool.rows(num_tokens)
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)


class _Spool:
    """One array that grows in a file without a name, `[token, *row_shape]`."""

    def __init__(self, folder: Path, like: npt.NDArray[Any]) -> None:
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by the writer)
        self.row_shape = like.shape[1:]
        self._dtype = like.dtype

    def add(self, rows: npt.NDArray[Any]) -> None:
        self.file.write(rows.astype(self._dtype, copy=False).tobytes())

    def rows(self, num_rows: int) -> npt.NDArray[Any]:
        """The first rows, mapped from the file; after them comes what was broken off."""
        self.file.flush()
        return np.memmap(self.file, self._dtype, "r", shape=(num_rows, *self.row_shape))


def check_out(path: str | os.PathLike[str]) -> Path:
    """The path, if a trace can be written there; to be asked before a long recording.

    Raises:
        TraceError: another ending than `.npz`, a folder, or one that is missing or not writable.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise TraceError(f"{path}: end the name in .npz")
    folder = _behind_links(path).parent
    if not folder.is_dir():
        raise TraceError(f"{path}: no such folder: make it, or name another file")
    if (kind := other_than_file(path)) is not None:
        raise TraceError(f"{path}: {kind} is there: name a file")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def _behind_links(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _unwritable(path: Path, error: OSError) -> TraceError:
    why = error.strerror or str(error)
    return TraceError(f"{path} cannot be written ({why}): make room, or name another file")


def _by_token(name: str, values: npt.ArrayLike, chunk: Trace) -> npt.NDArray[Any]:
    found = np.asarray(values)
    if found.ndim == 2:
        found = found[None]
    if found.ndim != 3 or found.shape[:2] != chunk.ids.shape[:2]:
        raise TraceError(
            f"array {name!r}: shape {found.shape}: give one row for each of the "
            f"{chunk.ids.shape[:2]} tokens and layers of 'ids'"
        )
    return found
