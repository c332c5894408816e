"""The page of `hotexperts bench --json`: speeds and hits over slots, and the part of the bound."""

from __future__ import annotations

from hotexperts.fields import Fields
from hotexperts.page.charts import Axes, Line, line_chart
from hotexperts.page.document import (
    Markup,
    Page,
    Text,
    bar,
    facts,
    figure,
    section,
    side_by_side,
    table,
)
from hotexperts.page.numbers import UNKNOWN, nbytes, number, percent

_STARTS = ("cold", "warm")


def bench_page(data: Fields) -> Page:
    """The page.

    Raises:
        FieldError: a field that is not what `hotexperts bench --json` writes.
    """
    rows = data.parts("rows")
    return Page(
        f"Benchmark of {data.text('model')}",
        [
            section("Configuration", facts(_configuration(data))),
            section(
                "Results",
                *_curves(rows),
                _table(rows),
                note="Percent of bound: the longer of the resident step and the missed bytes over "
                "the link, in parts of the measured step; it falls when fewer bytes are missed.",
            ),
            *_by_group(rows),
        ],
    )


def _configuration(data: Fields) -> list[tuple[str, str]]:
    machine = data.part("machine")
    versions = machine.part("versions")
    used = (f"{name} {versions.text(name)}" for name in versions.values if name in versions)
    where = machine.text("gpu") if "gpu" in machine else f"CPU, {machine.count('cpu_cores')} cores"
    return [
        ("file", data.file),
        ("model", f"{data.text('model')} ({data.text('model_class')}, {data.text('dtype')})"),
        (
            "experts",
            f"{data.count('num_experts')} of {nbytes(data.count('expert_nbytes'))} in each of "
            f"{data.count('num_layers')} layers",
        ),
        ("routing", data.text("routing")),
        (
            "measured",
            f"{data.count('prompt_tokens')} tokens of prompt, {data.count('steps')} steps",
        ),
        ("machine", f"{where}; Python {machine.text('python')}; {', '.join(used)}"),
        ("date", machine.text("date")),
    ]


def _curves(rows: list[Fields]) -> list[Markup]:
    """Warm speed and hits over slots, a curve a batch; the resident model has no slots."""
    caches = [row for row in rows if "capacity" in row and "warm" in row]
    if not caches:
        return []
    drawn = []
    for title, name, factor in (
        ("decode, warm, tokens/s", "tokens_per_s", 1.0),
        ("hit rate, warm, %", "hit_rate", 100.0),
    ):
        points: dict[int, list[tuple[float, float]]] = {}
        for row in caches:
            value = row.part("warm").number_or_none(name)
            if value is not None:
                point = float(row.count("capacity")), factor * value
                points.setdefault(row.count("batch"), []).append(point)
        lines = [
            Line(f"batch {batch}", sorted(found), 2 + at)
            for at, (batch, found) in enumerate(points.items())
        ]
        if lines:
            ticks = sorted({x for line in lines for x, _ in line.points})
            axes = Axes("slots a layer", title, x_ticks=ticks)
            drawn.append(figure(title, line_chart(lines, axes)))
    return [side_by_side(*drawn)]


def _table(rows: list[Fields]) -> Markup:
    names = ("slots", "batch", "start", "load", "prefill", "step", "tokens/s", "hit rate")
    return table(
        (*names, "missed a step", "of bound", ""),
        (cells for row in rows for cells in _cells(row)),
        num_texts=0,
    )


def _cells(row: Fields) -> list[list[Text]]:
    """A line for each start, or one that says why there is none."""
    slots = str(row.count("capacity")) if "capacity" in row else "all, resident"
    first: list[Text] = [slots, str(row.count("batch"))]
    load = f"{number(row.number('load_seconds'))} s"
    if row.values.get("verified") is False:
        return [[*first, "differs", load, *["no speed"] * 3, *[UNKNOWN] * 3, ""]]
    return [[*first, start, load, *_figures(row.part(start))] for start in _STARTS if start in row]


def _figures(part: Fields) -> list[Text]:
    bound = part.number_or_none("percent_of_bound")
    return [
        f"{number(part.number('prefill_ms'))} ms",
        f"{number(part.number('step_ms'))} ms",
        number(part.number("tokens_per_s")),
        percent(part.rate_or_none("hit_rate")),
        nbytes(part.number_or_none("bytes_per_step")),
        UNKNOWN if bound is None else f"{bound:.0f} %",
        bar(None if bound is None else bound / 100),
    ]


def _by_group(rows: list[Fields]) -> list[Markup]:
    """Hit rates of what was read."""
    lines: list[list[Text]] = []
    for row in rows:
        for group in row.parts("groups") if "groups" in row else ():
            rate = group.rate_or_none("hit_rate")
            place = str(row.count("capacity")), str(row.count("batch"))
            lines.append([group.text("name"), *place, percent(rate), bar(rate)])
    if not lines:
        return []
    names = ("what was decoded", "slots", "batch", "hit rate, warm", "")
    return [section("By what was decoded", table(names, lines))]
