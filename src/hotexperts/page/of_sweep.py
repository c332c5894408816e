"""Replays as drawings: hit rates over slots between LRU and Belady, and who is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hotexperts.page.charts import Axes, Line, line_chart
from hotexperts.page.document import Markup, Page, figure, section, side_by_side
from hotexperts.page.heat import heat_map
from hotexperts.simulate.sweep import BELADY, FRAME, LRU, Cell, Counts, Sweep
from hotexperts.simulate.trace import Trace, use_by_layer

_FRAME_COLOURS = {LRU: 0, BELADY: 1}


def sweep_page(sweep: Sweep, counts: Counts) -> Page:
    """A section a trace: curves for each batch, then the heat maps.

    Args:
        sweep: what was replayed.
        counts: from `run_sweep`.
    """
    parts = []
    for name, trace in sweep.traces.items():
        curves = (curve_figure(sweep, counts, name, batch) for batch in sweep.batches)
        parts.append(section(Path(name).name, side_by_side(*curves), use_figures(trace)))
    return Page("Replays", parts)


def curve_figure(sweep: Sweep, counts: Counts, name: str, batch: int) -> Markup:
    """Hit rates over slots of one trace with one batch; LRU and Belady bound the shaded gap."""
    slots = sorted(sweep.capacities_of(name))
    policies = list(dict.fromkeys([*FRAME, *sweep.policies]))
    colours = policy_colours(policies)
    lines = []
    for policy in policies:
        rates = [100 * counts[Cell(name, policy, n, batch)].hit_rate for n in slots]
        points = list(zip(map(float, slots), rates, strict=True))
        lines.append(Line(policy, points, colours[policy], dashed=policy == BELADY))
    axes = Axes(
        f"slots a layer, of {sweep.traces[name].num_experts} experts",
        "hit rate in decode, %",
        x_ticks=slots,
        y_most=100.0,
    )
    return figure(f"batch {batch}", line_chart(lines, axes, between=(0, 1)))


def use_figures(trace: Trace) -> Markup:
    """How often each expert of each layer is asked for: by id, and the most used first."""
    use = use_by_layer(trace)
    unit = "times the layer's mean"
    return side_by_side(
        figure("use of experts in decode", heat_map(use, "expert", "layer", unit)),
        figure(
            "the same, sorted: how uneven use is",
            heat_map(-np.sort(-use, axis=1), "experts, the most used first", "layer", unit),
        ),
    )


def policy_colours(policies: Sequence[str]) -> dict[str, int]:
    """A colour for each policy, those of LRU and Belady always the same."""
    others = [policy for policy in policies if policy not in _FRAME_COLOURS]
    first = len(_FRAME_COLOURS)
    return _FRAME_COLOURS | {policy: first + at for at, policy in enumerate(others)}
