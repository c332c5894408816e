"""One recorded routing: which experts each token asked for in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hotexperts.errors import HotExpertsError

NOT_RECORDED = -1
PREFILL, DECODE = 0, 1
TAPS = ("output", "input")
MAX_EXPERT = 65_534  # 65,535 stands for "not recorded" in the largest ids that a file holds
MAX_CELLS = 1 << 28  # ids in memory, 4 bytes each: more is a broken file rather than a long one

Ints = npt.NDArray[np.int32]


class TraceError(HotExpertsError, ValueError):
    """A trace is not what its layout promises; the message names file, place and field."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Recorded routing; the tokens of one sequence lie in order.

    Attributes:
        ids: `[token, layer, k]`, distinct experts of a token; -1 where nothing was recorded.
        phase: `[token]`, 0 prefill, 1 decode.
        seq: `[token]`, number of the sequence that the token belongs to.
        meta: whatever is known about the recording; `n_experts` is read, the rest is kept.
        guesses: by tap, "output" of the layer before or "input" of its MoE, `[token, layer, n]`:
            the experts that the layer's router ranks highest there, the highest first; -1 where
            nothing was recorded.

    Raises:
        TraceError: the arrays do not fit together or hold a value that means nothing.
    """

    ids: Ints
    phase: Ints
    seq: Ints
    meta: Mapping[str, Any] = field(default_factory=dict)
    guesses: Mapping[str, Ints] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ids", "phase", "seq"):
            object.__setattr__(self, name, _frozen_ints(name, getattr(self, name)))
        _check_shapes(self)
        _check_values(self)
        _check_num_experts(self)
        guesses = {tap: _checked_guesses(self, tap) for tap in self.guesses}
        object.__setattr__(self, "guesses", guesses)

    @property
    def num_layers(self) -> int:
        """Recorded layers."""
        return int(self.ids.shape[1])

    @property
    def num_experts(self) -> int:
        """Experts in a layer: `n_experts` of the meta data, or the highest id and one."""
        return int(self.meta.get("n_experts", self.ids.max() + 1))

    def sequences(self) -> list[list[int]]:
        """The tokens of each sequence, sequences in the order in which they begin."""
        tokens: dict[int, list[int]] = {}
        for token, sequence in enumerate(self.seq.tolist()):
            tokens.setdefault(sequence, []).append(token)
        return list(tokens.values())


def use_by_layer(trace: Trace) -> npt.NDArray[np.float64]:
    """`[layer, expert]`: tokens of decode that ask for each expert, in parts of the layer's mean.

    Where a trace has no decode, all of its tokens count.
    """
    is_counted = trace.phase == DECODE if (trace.phase == DECODE).any() else trace.phase >= 0
    found = np.zeros((trace.num_layers, trace.num_experts))
    for layer in range(trace.num_layers):
        ids = trace.ids[is_counted, layer].ravel()
        found[layer] = np.bincount(ids[ids != NOT_RECORDED], minlength=trace.num_experts)
    found /= np.maximum(found.mean(axis=1, keepdims=True), 1e-9)
    return found


def _frozen_ints(name: str, values: Any) -> Ints:
    found = np.asarray(values)
    if found.dtype.kind not in "iu":
        raise TraceError(f"array {name!r}: {found.dtype} values: give integers")
    info = np.iinfo(np.int32)
    if found.size and (int(found.min()) < info.min or int(found.max()) > info.max):
        raise TraceError(f"array {name!r}: a value does not fit 32 bits: give one that does")
    ints = found.astype(np.int32)
    ints.flags.writeable = False
    return ints


def _check_shapes(trace: Trace) -> None:
    if trace.ids.ndim != 3 or 0 in trace.ids.shape:
        raise TraceError(
            f"array 'ids': shape {trace.ids.shape}: give [token, layer, k], none of them 0"
        )
    if trace.ids.size > MAX_CELLS:
        raise TraceError(
            f"array 'ids': shape {trace.ids.shape} is over {MAX_CELLS} ids: give fewer tokens"
        )
    for name, array in (("phase", trace.phase), ("seq", trace.seq)):
        if array.shape != trace.ids.shape[:1]:
            raise TraceError(
                f"array {name!r}: shape {array.shape}: give one value for each of the "
                f"{len(trace.ids)} tokens of 'ids'"
            )


def _check_values(trace: Trace) -> None:
    bad = (trace.ids < NOT_RECORDED) | (trace.ids > MAX_EXPERT)
    _refuse_first("ids", bad, trace.ids, f"give 0 to {MAX_EXPERT}, or -1 for none")
    in_order = np.sort(trace.ids, axis=2)
    twice = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] != NOT_RECORDED)
    _refuse_first("ids", twice, in_order, "give an expert only once a layer")
    _refuse_first("phase", (trace.phase >> 1) != 0, trace.phase, "give 0 for prefill, 1 for decode")
    if trace.ids.max() == NOT_RECORDED:
        raise TraceError("array 'ids': nothing is recorded: give at least one id")


def _checked_guesses(trace: Trace, tap: str) -> Ints:
    if tap not in TAPS:
        raise TraceError(f"guesses at {tap!r}: give one of {', '.join(TAPS)}")
    name = f"guesses of {tap}"
    found = _frozen_ints(name, trace.guesses[tap])
    if found.ndim != 3 or found.shape[:2] != trace.ids.shape[:2]:
        raise TraceError(
            f"array {name!r}: shape {found.shape}: give one row for each of the "
            f"{trace.ids.shape[:2]} tokens and layers of 'ids'"
        )
    bad = (found < NOT_RECORDED) | (found >= trace.num_experts)
    _refuse_first(name, bad, found, f"give 0 to {trace.num_experts - 1}, or -1")
    in_order = np.sort(found, axis=2)
    twice = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] != NOT_RECORDED)
    _refuse_first(name, twice, in_order, "give an expert one rank")
    return found


def _refuse_first(name: str, bad: npt.NDArray[np.bool_], values: Ints, why: str) -> None:
    if bad.any():
        place = tuple(int(at) for at in np.argwhere(bad)[0])
        axes = zip(("token", "layer"), place, strict=False)
        where = ", ".join(f"{axis} {at}" for axis, at in axes)
        raise TraceError(f"array {name!r}, {where}: {int(values[place])}: {why}")


def _check_num_experts(trace: Trace) -> None:
    if "n_experts" not in trace.meta:
        return
    given, highest = trace.meta["n_experts"], int(trace.ids.max())
    if not isinstance(given, int) or isinstance(given, bool) or given > MAX_EXPERT + 1:
        raise TraceError(f"meta, field 'n_experts': {given!r}: give the experts of a layer")
    if given <= highest:
        raise TraceError(
            f"meta, field 'n_experts': {given}, but 'ids' holds {highest}: give more than that"
        )
