"""The page of one trace: what it is, what policies make of it, and when they miss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotexperts.page.charts import Axes, Line, line_chart
from hotexperts.page.document import Markup, Page, facts, figure, section, side_by_side, table
from hotexperts.page.heat import heat_map
from hotexperts.page.numbers import nbytes, percent
from hotexperts.page.of_sweep import curve_figure, policy_colours, use_figures
from hotexperts.simulate.sweep import Counts, Sweep
from hotexperts.simulate.trace import DECODE, Trace

_NUM_BINS = 200
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Timeline:
    """When replays miss.

    Attributes:
        capacity: slots a layer.
        misses: by policy: `[step, layer]`.
        expert_nbytes: None where nobody says.
    """

    capacity: int
    misses: Mapping[str, npt.NDArray[np.int64]]
    expert_nbytes: int | None


def trace_page(
    name: str, sweep: Sweep, counts: Counts, rows: list[dict[str, Any]], timeline: Timeline
) -> Page:
    """The page.

    Args:
        name: of the trace in the sweep.
        sweep: what was replayed.
        counts: from `run_sweep`.
        rows: from `sweep_rows`.
        timeline: of one size.
    """
    trace = sweep.traces[name]
    curves = (curve_figure(sweep, counts, name, batch) for batch in sweep.batches)
    return Page(
        f"Routing of {Path(name).name}",
        [
            section("Trace", facts(_about(name, trace))),
            section(
                "Hit rates over slots",
                side_by_side(*curves, _table(rows)),
                note="Counted over decode. Belady knows the future: the gap closed is 0 % for the "
                "hits of LRU and 100 % for Belady's.",
            ),
            section("Who is asked for", use_figures(trace)),
            _timeline(timeline),
        ],
    )


def _about(name: str, trace: Trace) -> list[tuple[str, str]]:
    num_decode = int((trace.phase == DECODE).sum())
    pairs = [
        ("file", name),
        ("tokens", f"{num_decode:,} of decode, {len(trace.phase) - num_decode:,} of prompts"),
        ("sequences", f"{len(trace.sequences()):,}"),
        ("layers", f"{trace.num_layers}"),
        ("experts", f"{trace.ids.shape[2]} of {trace.num_experts} for each token in each layer"),
    ]
    said = ((key, value) for key, value in trace.meta.items() if key != "n_experts")
    return pairs + [(str(k), str(v)) for k, v in said if isinstance(v, str | int | float)]


def _table(rows: list[dict[str, Any]]) -> Markup:
    names = ("policy", "batch", "slots", "hit rate", "gap closed", "missed")
    cells = (
        [
            row["policy"],
            str(row["batch"]),
            str(row["capacity"]),
            percent(row["hit_ratio"]),
            percent(row["gap_to_belady_closed"]),
            nbytes(row["miss_bytes"]),
        ]
        for row in rows
    )
    return table(names, cells)


def _timeline(timeline: Timeline) -> Markup:
    """Misses of each step as curves, and of each layer as a heat map."""
    size, colours = timeline.expert_nbytes, policy_colours(list(timeline.misses))
    lines = [
        Line(policy, _binned(misses.sum(axis=1)), colours[policy])
        for policy, misses in timeline.misses.items()
    ]
    axes = Axes(
        "step of decode",
        "experts missed a step",
        right_label="" if size is None else "MiB a step",
        right_factor=(size or 0) / _MIB,
    )
    policy, misses = next(iter(timeline.misses.items()))
    by_layer = np.stack([part.mean(axis=0) for part in _parts(misses)], axis=1)
    said = "" if size is not None else " The size of an expert is not known: give --expert-mb."
    return section(
        f"When misses come, with {timeline.capacity} slots a layer",
        side_by_side(
            figure("misses and bytes", line_chart(lines, axes)),
            figure(
                f"where {policy} misses",
                heat_map(by_layer, "time, in parts of the trace", "layer", "misses a step"),
            ),
        ),
        note=f"Means over {len(_parts(misses))} equal parts of {len(misses):,} steps." + said,
    )


def _binned(values: npt.NDArray[np.int64]) -> list[tuple[float, float]]:
    """The mean of each part, at its first step."""
    parts = _parts(values)
    first = np.cumsum([0, *(len(part) for part in parts[:-1])])
    return [(float(x), float(part.mean())) for x, part in zip(first, parts, strict=True)]


def _parts(values: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    return np.array_split(values, min(_NUM_BINS, len(values)))
