"""The page of `hotexperts simulate --json`: curves and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hotexperts.fields import Fields
from hotexperts.page.charts import Axes, Line, line_chart
from hotexperts.page.document import Markup, Page, figure, section, table
from hotexperts.page.numbers import nbytes, number, percent
from hotexperts.page.of_sweep import policy_colours
from hotexperts.simulate.sweep import BELADY


def rows_page(rows: Sequence[Fields]) -> Page:
    """Curves and tables of each trace and batch.

    Raises:
        FieldError: a field that is not what `hotexperts simulate --json` writes.
    """
    groups: dict[tuple[str, int], list[Fields]] = {}
    for row in rows:
        groups.setdefault((row.text("trace"), row.count("batch")), []).append(row)
    parts = [
        section(f"{Path(trace).name}, batch {batch}", *_curves(group), _table(group), note=trace)
        for (trace, batch), group in groups.items()
    ]
    return Page(f"Replays of {Path(rows[0].file).name}", parts)


def _curves(rows: Sequence[Fields]) -> list[Markup]:
    """A curve a policy, where at least one has hits to show."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        rate = row.rate_or_none("hit_ratio")
        if rate is not None:
            point = float(row.count("capacity")), 100 * rate
            points.setdefault(row.text("policy"), []).append(point)
    if not points:
        return []
    colours = policy_colours(list(points))
    lines = [
        Line(policy, sorted(found), colours[policy], dashed=policy == BELADY)
        for policy, found in points.items()
    ]
    ticks = sorted({x for found in points.values() for x, _ in found})
    axes = Axes("slots a layer", "hit rate in decode, %", x_ticks=ticks, y_most=100.0)
    return [figure("hit rates over slots", line_chart(lines, axes))]


def _table(rows: Sequence[Fields]) -> Markup:
    names = ("policy", "slots", "hit rate", "gap closed", "missed", "ms a token")
    return table(names, (_cells(row) for row in rows))


def _cells(row: Fields) -> list[str]:
    time, missed = row.number_or_none("est_ms_per_token"), row.number_or_none("miss_bytes")
    return [
        row.text("policy"),
        str(row.count("capacity")),
        percent(row.rate_or_none("hit_ratio")),
        percent(row.signed_or_none("gap_to_belady_closed")),
        nbytes(missed),
        number(time),
    ]
