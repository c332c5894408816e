"""The tables of docs/prefetch.md, from `bench/results/prefetch-simulated.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results/prefetch-simulated.json"
Rows = list[dict[str, Any]]
AHEAD = (1, 2, 3, 4)
TAPS = {"output": "after the experts", "input": "before the experts"}


def tables() -> dict[str, str]:
    """The document's blocks by name."""
    results = json.loads(RESULTS.read_text())
    return {
        "slack": slack_table(results),
        "recall": recall_table(results["recall"], results["trained"]),
        "recall-ids": ids_table(results["recall"]),
        "coverage": coverage_table(results["coverage"]),
        "first": first_table(results["coverage"]),
        "time": time_table(results["time"]),
    }


def slack_table(results: dict[str, Any]) -> str:
    """How many transfers pass between a guess and the next layer's router."""
    lines = []
    for name, case in results["cases"].items():
        copy_ms = case["nbytes"] / results["link_gb_s"] / 1e6
        cells = [f"{part * case['compute_ms'] / copy_ms:.2f}" for part in (0.5, 1.0)]
        size = f"{case['nbytes'] / 2**20:.1f} MiB"
        lines.append([name, size, f"{1000 * copy_ms:.0f} us", *cells])
    head = ["experts of", "an expert", "one transfer", *(f"tap {where}" for where in TAPS.values())]
    return table(head, lines)


def recall_table(rows: Rows, trained: Rows) -> str:
    """Of moe507m, a row a predictor and tap, a column a look-ahead."""
    mine = [row for row in rows if row["trace"] == "moe507m"]
    lines = []
    for kind in dict.fromkeys((row["predictor"], row["tap"]) for row in mine):
        found = {row["ahead"]: row for row in mine if (row["predictor"], row["tap"]) == kind}
        told = [
            "gate" in kind[0] or (row["gate"] and kind[0] == "combined") for row in found.values()
        ]
        where = f", {TAPS[kind[1]]}" if any(told) else ""
        cells = [pair(found[ahead]["recall"]) if ahead in found else "" for ahead in AHEAD]
        lines.append([f"`{kind[0]}`{where}", *cells])
    for row in trained:
        name = f"`{row['predictor']}`, {TAPS[row['tap']]}, after 24 other sequences"
        lines.append([name, pair(row["recall"]), "", "", ""])
    return table(["moe507m", *(f"{ahead} ahead" for ahead in AHEAD)], lines)


def ids_table(rows: Rows) -> str:
    """Of the traces without a router's guesses, the lift and the combination."""
    lines = []
    for name in dict.fromkeys(row["trace"] for row in rows if row["trace"] != "moe507m"):
        for predictor in ("previous", "cross-lift", "combined"):
            found = {
                row["ahead"]: row["recall"]
                for row in rows
                if (row["trace"], row["predictor"], row["tap"]) == (name, predictor, "output")
            }
            lines.append([name, f"`{predictor}`", *(pair(found[ahead]) for ahead in AHEAD)])
    return table(["trace", "predictor", *(f"{ahead} ahead" for ahead in AHEAD)], lines)


def coverage_table(rows: Rows) -> str:
    """Stall-free hits and bytes, a row a predictor, a column a trace."""
    names = list(dict.fromkeys(row["trace"] for row in rows))
    by = {(row["predictor"], row["trace"]): row for row in rows}
    any_row = {name: next(row for row in rows if row["trace"] == name) for name in names}
    lines = [["none", *(percent(any_row[name]["hit_rate"]) for name in names)]]
    for predictor in dict.fromkeys(row["predictor"] for row in rows):
        cells = [
            f"{percent(row['stall_free'])}, {row['relative_bytes']:.2f}x" if row else ""
            for row in (by.get((predictor, name)) for name in names)
        ]
        lines.append([f"`{predictor}`", *cells])
    lines.append(["Belady, no prefetch", *(percent(any_row[name]["belady"]) for name in names)])
    return table(["predictor", *names], lines)


def first_table(rows: Rows) -> str:
    """The combination without the first layer, whose source is of another token."""
    lines = []
    for row in rows:
        if row["predictor"] in ("combined", "combined, ids only"):
            later = row["after_first_layer"]
            cells = [percent(later[name]) for name in ("hit_rate", "stall_free")]
            lines.append([row["trace"], f"`{row['predictor']}`", *cells])
    return table(["trace", "predictor", "hit rate", "no stall"], lines)


def time_table(rows: Rows) -> str:
    """Milliseconds a token, a row a predictor and tap, a column a look-ahead."""
    lines = []
    for kind in dict.fromkeys((row["trace"], row["predictor"], row["tap"]) for row in rows):
        mine = {
            row["ahead"]: row
            for row in rows
            if (row["trace"], row["predictor"], row["tap"]) == kind
        }
        without = next(iter(mine.values()))["ms_without"]
        cells = [timed(mine[ahead], without) if ahead in mine else "" for ahead in AHEAD]
        lines.append([kind[0], f"`{kind[1]}`, {TAPS[kind[2]]}", f"{without:.2f}", *cells])
    head = ["trace", "predictor", "without", *(f"{ahead} ahead" for ahead in AHEAD)]
    return table(head, lines)


def timed(row: dict[str, Any], without: float) -> str:
    return f"{row['ms_per_token']:.2f} ({100 * (row['ms_per_token'] / without - 1):+.0f} %)"


def pair(recall: list[float]) -> str:
    return " / ".join(f"{share:.3f}".lstrip("0") for share in recall)


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
