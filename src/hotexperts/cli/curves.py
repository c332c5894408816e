"""Hit rates over slots as curves, and use as a heat map, by matplotlib; imported when asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hotexperts.simulate.sweep import BELADY, FRAME, LRU, Cell, Counts, Sweep
from hotexperts.simulate.trace import Trace, use_by_layer

_WIDTH, _HEIGHT = 4.5, 3.4  # inches of one trace with one batch
_FRAME = {LRU: {"color": "0.45"}, BELADY: {"color": "black", "linestyle": "--"}}


def draw_curves(sweep: Sweep, counts: Counts, path: Path) -> None:
    """A row a trace: curves for each batch, then the heat map.

    LRU and Belady bound the shaded gap. The heat map shows how often each expert of each layer is
    asked for in decode; experts are sorted within their layer, so that it shows how uneven use is.

    Args:
        sweep: what was replayed.
        counts: from `run_sweep`.
        path: its end says what matplotlib writes.

    Raises:
        OSError: the file cannot be written.
    """
    shape = len(sweep.traces), len(sweep.batches) + 1
    figure = Figure(figsize=(_WIDTH * shape[1], _HEIGHT * shape[0]), layout="constrained")
    axes = figure.subplots(*shape, squeeze=False)
    for row, (name, trace) in zip(axes, sweep.traces.items(), strict=True):
        for axis, batch in zip(row, sweep.batches, strict=False):
            _draw_one(axis, sweep, counts, name, batch)
        _draw_heat(figure, row[-1], trace)
    figure.savefig(path, dpi=150)


def _draw_heat(figure: Any, axis: Any, trace: Trace) -> None:
    use = -np.sort(-use_by_layer(trace), axis=1)
    image = axis.imshow(use, aspect="auto", interpolation="nearest", cmap="inferno")
    axis.set_title("use in decode", fontsize="medium")
    axis.set_xlabel("experts, the most used first")
    axis.set_ylabel("layer")
    figure.colorbar(image, ax=axis, label="times the layer's mean")


def _draw_one(axis: Any, sweep: Sweep, counts: Counts, name: str, batch: int) -> None:
    slots = sorted(sweep.capacities_of(name))

    def rates(policy: str) -> list[float]:
        return [100 * counts[Cell(name, policy, n, batch)].hit_rate for n in slots]

    axis.fill_between(slots, *(rates(policy) for policy in FRAME), color="0.92")
    for policy in dict.fromkeys([*FRAME, *sweep.policies]):
        axis.plot(slots, rates(policy), marker=".", label=policy, **_FRAME.get(policy, {}))
    axis.set_title(f"{Path(name).name}, batch {batch}".replace("$", r"\$"), fontsize="medium")
    axis.set_xlabel(f"slots a layer, of {sweep.traces[name].num_experts} experts")
    axis.set_xticks(slots)
    axis.set_ylabel("hit rate in decode, %")
    axis.grid(color="0.9")
    axis.legend()
