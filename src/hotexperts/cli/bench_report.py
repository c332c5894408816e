"""The report of `hotexperts bench`."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotexperts.bench.earlier import STARTS
from hotexperts.cli.report import Data
from hotexperts.page.numbers import UNKNOWN, nbytes, percent


def bench_report(data: Data) -> RenderableType:
    """Tables for people.

    Args:
        data: what `hotexperts.cli.benchmark.run_benchmark` returns.
    """
    parts: list[RenderableType] = [Text(_title(data)), _table(data)]
    parts += (Text(line) for line in (*_notes(data), *_differences(data)))
    if "compared" in data:
        parts += [Text("Since the earlier result:"), _changes(data["compared"])]
    return Group(*parts)


def _title(data: Data) -> str:
    machine = data["machine"]
    links = [row["link_gb_s"] for row in data["rows"] if "link_gb_s" in row]
    link = f"{min(links):.1f}" + (f" to {max(links):.1f}" if min(links) < max(links) else "")
    where = machine.get("gpu", f"CPU, {machine['cpu_cores']} cores, no GPU")
    return (
        f"{data['model']} ({data['model_class']}, {data['dtype']}), {data['num_layers']} layers of "
        f"{data['num_experts']} experts of {nbytes(data['expert_nbytes'])}; {where}; copies "
        f"at {link} GB/s; {data['prompt_tokens']} tokens of prompt, {data['steps']} steps; "
        f"{data['routing']}"
    )


def _table(data: Data) -> Table:
    names = ("slots", "batch", "start", "prefill ms", "step ms", "tok/s", "hits", "missed", "bound")
    table = _headed(*names)
    for row in data["rows"]:
        first = [_slots(row["capacity"]), str(row["batch"])]
        for start in STARTS:
            if start in row:
                table.add_row(*first, start, *_cells(row[start]))
                first = ["", ""]
        if first[1]:
            table.add_row(*first, "DIFFERENT")
    return table


def _headed(*names: str) -> Table:
    """Narrow enough for 80 characters."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, justify="left" if name == "start" else "right", no_wrap=True)
    return table


def _slots(capacity: int | None) -> str:
    return "none" if capacity is None else str(capacity)


def _notes(data: Data) -> list[str]:
    """What the table's words mean, how long loading took, and hit rates by what was read."""
    rows = [row for row in data["rows"] if row["batch"] == data["rows"][0]["batch"]]
    loads = (f"{_slots(row['capacity'])} {row['load_seconds']:.1f} s" for row in rows)
    lines = [
        "none: every expert resident; missed: bytes a step; bound: see --help",
        f"load: {', '.join(loads)}",
    ]
    lines += (
        f"{row['capacity']} slots, warm, a step: {_prefetched(row['warm'])}"
        for row in rows
        if "prefetches_per_step" in row.get("warm", {})
    )
    if data["domains"]:
        lines += (
            f"{row['capacity']} slots, warm hits: "
            + ", ".join(
                f"{g['name']} {percent(g['hit_rate']).removesuffix(' %')}" for g in row["groups"]
            )
            + " %"
            for row in rows
            if "groups" in row
        )
    return lines


def _prefetched(part: Data) -> str:
    begun, used = part["prefetches_per_step"], part["prefetch_hits_per_step"]
    ahead, taken = part["prefetch_bytes_per_step"], part["prefetch_saved_bytes_per_step"]
    return (
        f"{begun:.1f} experts begun ahead, {used:.1f} used ({nbytes(ahead)}, {nbytes(taken)} taken)"
    )


def _cells(part: Data) -> list[str]:
    """Of one start; a resident model has no hits."""
    bound = part.get("percent_of_bound")
    return [
        _ms(part["prefill_ms"]),
        _ms(part["step_ms"]),
        f"{part['tokens_per_s']:.1f}",
        percent(part.get("hit_rate")),
        nbytes(part.get("bytes_per_step")),
        UNKNOWN if bound is None else f"{bound:.0f} %",
    ]


def _differences(data: Data) -> list[str]:
    lines = []
    tolerance = data.get("tolerance")  # of vLLM alone
    if all(row["verified"] for row in data["rows"] if "verified" in row):
        what = f"log probabilities, to {tolerance:.2g}" if tolerance else "bits"
        lines.append(f"Every cache gives the resident model's {what}.")
    if all(row.get("verified") is None for row in data["rows"]):
        lines.append("Not verified, and no bound: the resident model was left out.")
    remedy = "run hotexperts verify" if tolerance is None else "please report it"
    for row in data["rows"]:
        first = row.get("first_difference")
        if first is not None:
            lines.append(
                f"{row['capacity']} slots, batch {row['batch']}: no speed, for the cache differs "
                f"from the resident model at token position {first['position']}, {first['where']}: "
                f"{remedy}"
            )
    return lines


def _changes(rows: list[Data]) -> Table:
    table = _headed("slots", "batch", "start", "tok/s was", "is", "change", "prefill", "hits")
    for row in rows:
        speed, hits = row["tokens_per_s"], row["hit_rate"]
        has_hits = hits["before"] is not None and hits["now"] is not None
        points = 100 * (hits["now"] - hits["before"]) if has_hits else None
        table.add_row(
            _slots(row["capacity"]),
            str(row["batch"]),
            row["start"],
            f"{speed['before']:.1f}",
            f"{speed['now']:.1f}",
            _signed(speed["change"]),
            _signed(row["prefill_ms"]["change"]),
            UNKNOWN if points is None else f"{points:+.1f}",
        )
    return table


def _signed(change: float | None) -> str:
    return UNKNOWN if change is None else f"{100 * change:+.1f} %"


def _ms(value: float) -> str:
    """Three digits at least."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{1 if value >= 100 else 2}f}"
