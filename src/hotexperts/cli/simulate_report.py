"""The report of `hotexperts simulate`."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from hotexperts.config import format_bytes

Data = dict[str, Any]
_UNKNOWN = "-"


def simulate_report(rows: list[Data]) -> RenderableType:
    """A table a trace.

    Args:
        rows: what `hotexperts.simulate.rows.sweep_rows` returns.
    """
    tables: dict[str, Table] = {}
    is_foretold = any("predictor" in row for row in rows)
    for row in rows:
        if row["trace"] not in tables:
            tables[row["trace"]] = _table(is_foretold)
        tables[row["trace"]].add_row(*_cells(row, is_foretold))
    parts: list[RenderableType] = []
    for name, table in tables.items():
        parts += [Text(name), table]
    if any(row["miss_bytes"] is None for row in rows):
        parts.append(Text("Bytes and times need --expert-mb, the size of an expert."))
    return Group(*parts)


def _table(is_foretold: bool) -> Table:
    """Of 80 columns: heads have two lines, and there is little between them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    names = ["batch", "slots", "policy", "hit\nrate", "gap\nclosed", "missed"]
    if is_foretold:
        names[3:] = ["prefetch", "hit\nrate", "no\nstall", "bytes"]
    for name in (*names, "ms a\ntoken", "tok/s", "of\nbound"):
        side: JustifyMethod = "left" if name in ("policy", "prefetch") else "right"
        table.add_column(name, justify=side, no_wrap=True)
    return table


def _cells(row: Data, is_foretold: bool) -> list[str | Text]:
    missed, bound = row["miss_bytes"], row["percent_of_bound"]
    amounts: list[str | Text] = [
        _percent(row["gap_to_belady_closed"]),
        _UNKNOWN if missed is None else format_bytes(missed),
    ]
    if is_foretold:
        relative = row.get("relative_bytes", 1.0)
        amounts = [
            _percent(row.get("stall_free_hit_ratio", row["hit_ratio"])),
            _UNKNOWN if relative is None else f"{relative:.2f}x",
        ]
    return [
        str(row["batch"]),
        str(row["capacity"]),
        Text(row["policy"]),
        *([Text(row.get("predictor", _UNKNOWN))] if is_foretold else ()),
        _percent(row["hit_ratio"]),
        *amounts,
        _number(row["est_ms_per_token"], num_decimals=2),
        _number(row["est_tokens_per_second"], num_decimals=1),
        _percent(None if bound is None else bound / 100),
    ]


def _percent(rate: float | None) -> str:
    return _UNKNOWN if rate is None else f"{100 * rate:.1f} %"


def _number(value: float | None, num_decimals: int) -> str:
    """So many decimals, or three digits below 1."""
    if value is None:
        return _UNKNOWN
    return f"{value:.{num_decimals}f}" if value >= 1 else f"{value:.3g}"
