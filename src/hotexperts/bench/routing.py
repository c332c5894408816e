"""Routing for a model without a trained router: recorded, or drawn. Needs no tensors."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from hotexperts.bench.shapes import Shape
from hotexperts.errors import ConfigError
from hotexperts.plain_file import other_than_file
from hotexperts.simulate import Trace, TraceError, read_trace
from hotexperts.simulate.generate import TraceSize, generate
from hotexperts.simulate.trace import NOT_RECORDED, Ints

_DRAWN = "fitted"
_NUM_DRAWN, _NUM_DRAWN_LAYERS = 48, 8


class Routing(NamedTuple):
    """Who is asked for.

    Attributes:
        ids: `[sequence, position, layer, k]`.
        about: where it comes from.
    """

    ids: Ints
    about: str


def find_routing(place: Path | None, shape: Shape, num_positions: int) -> Routing:
    """Recorded sequences of a shape's kind; drawn ones where no place is given.

    Args:
        place: a trace, or a folder in which one trace is of the shape's experts.
        shape: the model's.
        num_positions: that are needed of each sequence.

    Raises:
        ConfigError: no such trace, several, or shorter sequences.
        TraceError: a file cannot be read.
    """
    if place is None:
        num_layers = min(_NUM_DRAWN_LAYERS, shape.sizes["num_hidden_layers"])
        size = TraceSize(_NUM_DRAWN, num_positions, num_layers, shape.num_experts, shape.top_k)
        return Routing(np.stack(list(generate(_DRAWN, size, 0))), f"drawn, {_DRAWN}")
    path, trace = _find(place, shape)
    sequences = trace.sequences()
    ids = [trace.ids[tokens] for tokens in sequences if len(tokens) >= num_positions]
    if not ids:
        most = max(map(len, sequences))
        raise ConfigError(
            f"{path} has at most {most} tokens a sequence, {num_positions} are wanted: lower "
            "--steps or --prompt-tokens"
        )
    cut = np.stack([each[:num_positions] for each in ids])
    if (cut == NOT_RECORDED).any():
        raise ConfigError(f"{path}: some layers of some tokens are not recorded: give another")
    return Routing(cut, path.name)


def _find(place: Path, shape: Shape) -> tuple[Path, Trace]:
    if place.is_file():
        trace = read_trace(place)
        if not _fits(trace, shape):
            raise ConfigError(
                f"--traces {place}: {trace.ids.shape[2]} of {trace.num_experts} experts, the shape "
                f"has {shape.top_k} of {shape.num_experts}: give another trace"
            )
        return place, trace
    if not place.is_dir():
        kind = other_than_file(place)
        wrong = "no such file or folder" if kind is None else f"{kind} is there"
        raise ConfigError(f"--traces {place}: {wrong}: give a file or folder that exists")
    read = {path: _read(path) for path in sorted(place.glob("*.npz"))}
    found = {path: trace for path, trace in read.items() if trace and _fits(trace, shape)}
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ConfigError(
            f"--traces {place}: one .npz with {shape.top_k} of {shape.num_experts} experts is "
            f"wanted, there is {names}: name the file"
        )
    return next(iter(found.items()))


def _read(path: Path) -> Trace | None:
    try:
        return read_trace(path)
    except TraceError:
        return None  # a folder may hold other archives


def _fits(trace: Trace, shape: Shape) -> bool:
    return (trace.num_experts, trace.ids.shape[2]) == (shape.num_experts, shape.top_k)
