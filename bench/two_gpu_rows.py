"""Rows of `bench/two_gpu.py`: compared with each other, and in lines."""

from __future__ import annotations

from typing import Any

import cases
from hotexperts.bench.bound import PART_OF_LINK

SHOWN = ("ms", "hit_rate", "percent_of_floor", "times_one_gpu", "stamped_ms")


def compare(table: cases.Table) -> dict[str, Any]:
    """Adds what takes two cases: floors by the link's rate, and one GPU against two."""
    link = _link_gb_s(table)
    one = table.get("one")
    for case, row in table.items():
        for name, found in row.get("runs", {}).items():
            rate = link.get("alone" if case == "one" else "together")
            resident = row["runs"].get(f"100.0% of slots, {name.split(', ')[1]}")
            if rate and resident and "ms" in found:
                copies = 1e3 * max(found["missed_gb_by_rank"]) / (PART_OF_LINK * rate)
                found["floor_ms"] = resident["ms"] + copies
                found["percent_of_floor"] = 100 * found["floor_ms"] / found["ms"]
            if rate and "stalls" in found:
                stalls = found["stalls"]
                stalls["uneven_ms_from_bytes"] = 1e3 * stalls["uneven_gb"] / rate
            if case != "one" and one and "ms" in one["runs"].get(name, {}) and "ms" in found:
                found["times_one_gpu"] = one["runs"][name]["ms"] / found["ms"]
    return {"link_gb_s": link, "two_of_one": _two_of_one(table)}


def _two_of_one(table: cases.Table) -> dict[str, Any]:
    """Start-up and host memory of two ranks, as parts of one's."""
    one, found = table.get("one"), {}
    for case in ("tp", "ep"):
        if one and case in table:
            row = table[case]
            found[case] = {
                "start": row["start_seconds"] / one["start_seconds"],
                "load": _most(row, "load_seconds") / _most(one, "load_seconds"),
                "host": _sum(row, "host") / _sum(one, "host"),
            }
    return found


def _most(row: cases.Row, name: str) -> float:
    return float(max(rank[name] for rank in row["ranks"]))


def _sum(row: cases.Row, name: str) -> float:
    return float(sum(rank[name] for rank in row["ranks"]))


def _link_gb_s(table: cases.Table) -> dict[str, float]:
    """Of one GPU's copies by the copy engine: alone, and the slower one's with both."""
    if "link" not in table:
        return {}
    gpus = [gpu["gb_s"]["copy_"] for gpu in table["link"]["gpus"]]
    return {how: min(gpu[how] for gpu in gpus) for how in ("alone", "together")}


def show(row: cases.Row) -> str:
    if "runs" not in row:
        return f"{row}"
    lines = [f"start {row['start_seconds']:.0f} s, load {_most(row, 'load_seconds'):.0f} s"]
    for name, found in row["runs"].items():
        parts = [f"{key} {found[key]:.4g}" for key in SHOWN if key in found]
        stalls = found.get("stalls")
        if stalls:
            parts.append(f"spread {stalls['spread_us']['median']:.1f} us")
            parts.append(f"uneven {stalls['uneven_ms']:.3f} ms")
        lines.append(f"  {name:28} {' '.join(parts)}")
    return "\n".join(lines)
