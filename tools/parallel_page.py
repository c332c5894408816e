"""The tables of docs/parallel.md: what each way of splitting copies, and what was measured.

The first is reckoned by `hotexperts.plan`, the second is in `bench/results/two-gpu.json`: as long
as there is no such result, that part is empty.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hotexperts.plan.split import demand, waves
from hotexperts.sizing import LayerShape

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "bench/results/two-gpu.json"
SHAPE = LayerShape(128, 8, 9_437_184)  # a layer of Qwen3-30B-A3B
NUM_LAYERS, NUM_SLOTS = 48, 32  # of one GPU; of several, as many bytes
CASES = ("one", "tp", "ep")
NAMES = {"one": "one GPU", "tp": "tensor parallel", "ep": "expert parallel"}


def reckoned() -> str:
    """Missed bytes and kernel calls of both ways, for as many bytes of slots in sum."""
    lines = [
        "| GPUs, batch | tp: GB a step, each | calls a layer "
        "| ep: GB a step, the busiest (the mean) | calls a layer |",
        "|---|---|---|---|---|",
    ]
    for num_gpus in (2, 4, 8):
        for batch in (1, 8, 32):
            tensor, expert = (cells(num_gpus, batch, way) for way in ("tp", "ep"))
            lines.append(f"| {num_gpus}, {batch} | {' | '.join((*tensor, *expert))} |")
    return "\n".join(lines)


def cells(num_gpus: int, batch: int, way: str) -> tuple[str, str]:
    """Bytes, and kernel calls of a layer."""
    experts, top_k, nbytes = SHAPE.num_experts, SHAPE.top_k, NUM_LAYERS * SHAPE.row_nbytes / 1e9
    if way == "tp":
        found = demand(experts, top_k, NUM_SLOTS, batch)
        calls = waves(SHAPE, NUM_SLOTS, batch)
        said = f"{found.missed * nbytes / num_gpus:.2f}"
    else:
        found = demand(experts, top_k, NUM_SLOTS // num_gpus, batch, num_gpus)
        local = LayerShape(experts // num_gpus, top_k, SHAPE.row_nbytes)
        calls = waves(local, NUM_SLOTS // num_gpus, batch)
        said = f"{found.missed * nbytes:.2f} ({found.mean_missed * nbytes:.2f})"
    return said, " to ".join(str(n) for n in dict.fromkeys(calls))


def measured() -> str:
    """What the result says; nothing where there is none."""
    return content(json.loads(RESULT.read_text())) if RESULT.exists() else ""


def content(result: dict[str, Any]) -> str:
    """The part, with the command that measured it."""
    machine, cases = result["machine"], result["cases"]
    parts = [
        f"## Measured\n\n`{result['command']}`, commit {machine['commit'][:7]}, "
        f"{machine['date'][:10]}.",
        links(cases["link"]) if "gpus" in cases.get("link", {}) else "",
        starts(cases, result["two_of_one"]),
        steps(cases),
        stalls(cases),
        left_out(cases),
    ]
    return "\n\n".join(part for part in parts if part)


def links(row: dict[str, Any]) -> str:
    lines = ["| copies from page-locked memory, GB/s | alone | both at once |", "|---|---|---|"]
    for gpu in row["gpus"]:
        for way, rates in gpu["gb_s"].items():
            name = {"copy_": "copy engine", "gather": "the cache's kernel"}[way]
            lines.append(
                f"| GPU {gpu['gpu']}, {name} | {rates['alone']:.1f} | {rates['together']:.1f} |"
            )
    return "\n".join(lines)


def starts(cases: dict[str, Any], two_of_one: dict[str, Any]) -> str:
    lines = [
        "| | start | of it the weights | experts in host memory | slots of a rank |",
        "|---|---|---|---|---|",
    ]
    for case in done(cases):
        row, ranks = cases[case], cases[case]["ranks"]
        more = two_of_one.get(case)
        of_one = {name: f" ({part:.2f}x)" for name, part in more.items()} if more else {}
        lines.append(
            f"| {NAMES[case]} | {row['start_seconds']:.0f} s{of_one.get('start', '')} "
            f"| {max(rank['load_seconds'] for rank in ranks):.0f} s{of_one.get('load', '')} "
            f"| {sum(rank['host'] for rank in ranks) / 1e9:.2f} GB{of_one.get('host', '')} "
            f"| {max(rank['slots'] for rank in ranks) / 1e9:.2f} GB |"
        )
    return "\n".join(lines)


def steps(cases: dict[str, Any]) -> str:
    """A decode step of each way; in brackets hits, bytes and how many times one GPU's speed."""
    found = done(cases)
    lines = [
        f"| a decode step | {' | '.join(NAMES[case] for case in found)} |",
        "|---" * (1 + len(found)) + "|",
    ]
    for name in rows(cases):
        cells = [step(cases[case]["runs"].get(name, {})) for case in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def step(run: dict[str, Any]) -> str:
    if "ms" not in run:
        return ""
    missed = max(run["missed_gb_by_rank"])
    more = [f"{100 * run['hit_rate']:.1f} % hits", f"{missed:.3g} GB a rank"]
    if "times_one_gpu" in run:
        more.insert(0, f"{run['times_one_gpu']:.2f}x")
    return f"{run['ms']:.2f} ms ({', '.join(more)})"


def stalls(cases: dict[str, Any]) -> str:
    """Who waits at the all-reduce after the experts, beside the one after attention."""
    lines = [
        "| waiting for each other | between arrivals, median and 90 % | after attention | lost a "
        "step to uneven copies | by their bytes | departures differ by |",
        "|---|---|---|---|---|---|",
    ]
    for case in done(cases):
        for name in rows(cases):
            run = cases[case]["runs"].get(name, {})
            found = run.get("stalls")
            if found is None:
                continue
            spread, attention = found["spread_us"], found["spread_after_attention_us"]
            by_bytes = found.get("uneven_ms_from_bytes")
            lines.append(
                f"| {NAMES[case]}, {name} | {spread['median']:.1f}, {spread['p90']:.1f} us "
                f"| {attention['median']:.1f}, {attention['p90']:.1f} us "
                f"| {found['uneven_ms']:.2f} of {run['stamped_ms']:.2f} ms "
                f"| {'' if by_bytes is None else f'{by_bytes:.2f} ms'} "
                f"| {found['departures_differ_us']['p90']:.1f} us |"
            )
    return "\n".join(lines) if len(lines) > 2 else ""


def left_out(cases: dict[str, Any]) -> str:
    """What there was no time for."""
    missing = [case for case in CASES if case not in done(cases)]
    found = [NAMES[case] for case in missing]
    found += [f"{NAMES[case]}, {name}" for case in done(cases) for name in cases[case]["left_out"]]
    return f"Not run: {'; '.join(found)}." if found else ""


def rows(cases: dict[str, Any]) -> list[str]:
    """Names of the runs, those of the smallest caches first."""
    names = {name: None for case in done(cases) for name in cases[case]["runs"]}
    return sorted(names, key=lambda name: (float(name.split("%")[0]), int(name.split()[-1])))


def done(cases: dict[str, Any]) -> list[str]:
    return [case for case in CASES if "runs" in cases.get(case, {})]
