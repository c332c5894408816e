"""Hit rates over slots as curves, by matplotlib; imported only when a plot is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hotexperts.simulate.sweep import BELADY, FRAME, LRU, Cell, Counts, Sweep

_WIDTH, _HEIGHT = 4.5, 3.4  # inches of one trace with one batch
_FRAME = {LRU: {"color": "0.45"}, BELADY: {"color": "black", "linestyle": "--"}}


def draw_curves(sweep: Sweep, counts: Counts, path: Path) -> None:
    """A row a trace and a column a batch; LRU and Belady bound the shaded gap.

    Raises:
        OSError: the file cannot be written.
    """
    shape = len(sweep.traces), len(sweep.batches)
    figure = Figure(figsize=(_WIDTH * shape[1], _HEIGHT * shape[0]), layout="constrained")
    axes = figure.subplots(*shape, squeeze=False)
    for row, name in zip(axes, sweep.traces, strict=True):
        for axis, batch in zip(row, sweep.batches, strict=True):
            _draw_one(axis, sweep, counts, name, batch)
    figure.savefig(path, dpi=150)


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
