"""Tables of `bench/results/`, one function each, for the pages that show them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "bench/results"


@cache
def load(result: str) -> Any:
    """A result."""
    return json.loads((RESULTS / f"{result}.json").read_text())


def decode_table() -> str:
    results = load("core-decode")
    lines = [
        "| case | tokens/s (lowest, highest) | slots a layer | hit rate | peak GPU memory |",
        "|---|---|---|---|---|",
    ]
    for case, row in results["cases"].items():
        speed = row["tokens_per_s"]
        lines.append(
            f"| {case} | {speed['median']:.2f} ({speed['min']:.2f}, {speed['max']:.2f}) "
            f"| {row.get('capacity', '')} | {percent(row.get('hit_rate'))} "
            f"| {row['peak_gpu_bytes'] / 2**30:.2f} GiB |"
        )
    return "\n".join(lines)


def device_table() -> str:
    results = load("device-decode")
    lines = [
        "| case | tokens/s | ms a step (mean) | slots a layer | hit rate |",
        "|---|---|---|---|---|",
    ]
    for case, row in results["cases"].items():
        mean = f"{row['step_ms_mean']:.2f}" if "step_ms_mean" in row else ""
        speed = row["tokens_per_s"]
        speed = speed["median"] if isinstance(speed, dict) else speed
        lines.append(
            f"| {case} | {speed:.{1 if speed >= 10 else 2}f} | {mean} | {row.get('capacity', '')} "
            f"| {percent(row.get('hit_rate'))} |"
        )
    return "\n".join(lines)


def prefill_table() -> str:
    results = load("device-prefill")
    names = {
        "resident": "every expert on the GPU",
        "all": "64 slots a layer, all hit",
        "quarter-adv": "16 slots a layer",
    }
    lines = ["| | 512 tokens | 2048 | 8192 |", "|---|---|---|---|"]
    for case, row in results["cases"].items():
        cells = []
        for found in row["prefill"].values():
            part = f" ({percent(found['part_of_link'])} of the link)" if found["gb_s"] else ""
            cells.append(f"{found['ms']['median']:.0f} ms{part}")
        lines.append(f"| {names[case]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def load_table() -> str:
    results = load("core-load")
    names = {
        "transformers": "Transformers alone",
        "file": "experts left in the file",
        "ram": "experts copied into memory",
    }
    lines = ["| way | seconds | memory |", "|---|---|---|"]
    for way, row in results["ways"].items():
        seconds, memory = row["seconds"]["median"], row["over_torch"] / 1e9
        lines.append(f"| {names[way]} | {seconds:.2f} | {memory:.2f} GB |")
    return "\n".join(lines)


def disk_table() -> str:
    """Reads beside fio's, then the model's tokens with all experts in memory and with a third."""
    results = load("tiers-disk")
    names = {
        "reader": "rows at random, 8 in flight",
        "calls_of_8": "layer calls that miss 8 experts",
        "calls_of_32": "layer calls that miss 32",
    }
    fio = results["reads"]["fio_gb_s"]["median"]
    lines = ["| reads | GB/s | of fio's |", "|---|---|---|", f"| fio | {fio:.2f} | |"]
    for way, row in results["reads"]["ways"].items():
        part = f"{row['percent_of_fio']:.0f} %"
        lines.append(f"| {names[way]} | {row['gb_s']['median']:.2f} | {part} |")
    lines += ["", "| experts | in memory | loaded in | tokens/s | read from disk |"]
    lines.append("|---|---|---|---|---|")
    for store, row in results["model"]["stores"].items():
        stats, where = row["stats"], {"ram": "in memory", "disk": "on disk"}[store]
        read = f"{stats['disk_bytes'] / 1e9:.2f} GB" if "disk_bytes" in stats else ""
        lines.append(
            f"| {where} | {row['host_nbytes'] / 1e9:.2f} GB | {row['load_seconds']:.1f} s "
            f"| {row['tokens_per_second']:.1f} | {read} |"
        )
    return "\n".join(lines)


def vllm_table() -> str:
    """A step of each batch in the engine without a cache, in the one with it, and offloaded."""
    results = load("vllm-decode")
    ways = {
        "stock vLLM, every expert on the GPU": ("stock", "stock"),
        "the same in the engine below": ("cache", "resident"),
        "128 slots (all)": ("cache", "128 slots"),
        "96 slots": ("cache", "96 slots"),
        "64 slots": ("cache", "64 slots"),
        "32 slots": ("cache", "32 slots"),
        "16 slots": ("cache", "16 slots"),
        "vLLM's UVA offload of experts": ("uva", "uva"),
        "32 slots, host-managed LRU without graphs": ("eager", "eager host, 32 slots"),
    }
    lines = ["| | batch 1 | batch 8 | batch 32 | prefill |", "|---|---|---|---|---|"]
    for name, (case, way) in ways.items():
        runs = results["cases"][case]["runs"]
        columns = ("batch 1", "batch 8", "batch 32", "prefill")
        cells = [vllm_cell(runs.get(f"{way}, {column}")) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def policy_tables() -> str:
    """A table a trace, policies by their mean, bounds last; the best of each column in bold."""
    results = load("policies")
    tables = []
    for trace, columns in results["hit_rates"].items():
        bounds = ("belady-atomic", "belady")
        names = [name for name in next(iter(columns.values())) if name not in bounds]
        names.sort(key=lambda name: -sum(column[name] for column in columns.values()))
        lines = [f"| {trace} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
        best = {title: max(column[n] for n in names) for title, column in columns.items()}
        for name in (*names, *bounds):
            cells = []
            for title, column in columns.items():
                shown = f"{100 * column[name]:.1f}"
                is_best = name in names and shown == f"{100 * best[title]:.1f}"
                cells.append(f"**{shown}**" if is_best else shown)
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def vllm_cell(run: dict[str, Any] | None) -> str:
    if run is None:
        return ""
    is_partial = run.get("hit_rate", 1) < 0.999
    return f"{run['ms']:.1f} ms" + (f" ({percent(run['hit_rate'])} hits)" if is_partial else "")


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def prefills_table() -> str:
    """The rows that were measured again since prefills are copied by the copy engine."""
    lines = ["| | ms | hits | of the link |", "|---|---|---|---|"]
    for name, run in load("vllm-prefills")["cases"]["prefills"]["runs"].items():
        hits, link = percent(run.get("hit_rate")), percent(run.get("of_link") or None)
        lines.append(f"| {name} | {run['ms']:.1f} | {hits} | {link} |")
    return "\n".join(lines)


def recording_table() -> str:
    """What recording costs a decode step."""
    lines = ["| | ms a step (lowest, highest) |", "|---|---|"]
    for way, row in load("trace-recording")["ways"].items():
        ms = row["step_ms"]
        lines.append(f"| {way} recording | {ms['median']:.1f} ({ms['min']:.1f}, {ms['max']:.1f}) |")
    return "\n".join(lines)


def bytes_table() -> str:
    """Missed bytes a step of the default and of `auto`, as parts of LRU's."""
    policies = ("lru", "auto", "adv")
    lines = ["| | " + " | ".join(f"`{name}`" for name in policies) + " |", "|---|---|---|---|"]
    for case, row in load("missed-bytes")["cases"].items():
        cells = [
            f"{row[name]['missed_bytes_per_step'] / 1e6:.0f} MB ({percent(row[name]['of_lru'])})"
            for name in policies
        ]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plan_table() -> str:
    """What bookkeeping on the device costs a layer where nothing is missed."""
    lines = ["| policy, experts, slots, ids | us a layer (lowest, highest) |", "|---|---|"]
    for case, row in load("device-plan")["all_hits_us_per_layer"].items():
        name = case.replace(" E=", ", ").replace(" C=", ", ").replace(" ids=", ", ")
        name = name.replace("empty", "an empty kernel")
        lines.append(f"| {name} | {row['median']:.2f} ({row['min']:.2f}, {row['max']:.2f}) |")
    return "\n".join(lines)


def copies_table() -> str:
    """What the copy engine and the kernel reach, by the size of an expert and their number."""
    lines = ["| bytes of an expert | experts | `copy_` | kernel |", "|---|---|---|---|"]
    for size, row in load("device-plan")["copies"].items():
        for count in ("1", "2", "4", "8"):
            engine, kernel = (f"{row[f'{way} x{count}']:.1f} GB/s" for way in ("copy_", "gather"))
            lines.append(f"| {size} | {count} | {engine} | {kernel} |")
    return "\n".join(lines)


def replay_table() -> str:
    """Millions of demands a minute that one core replays."""
    policies = load("simulate-speed")["policies"]
    columns = list(next(iter(policies.values())))
    lines = ["| policy | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for name, row in policies.items():
        speeds = (row[column]["demands_a_minute"]["median"] / 1e6 for column in columns)
        lines.append(f"| `{name}` | " + " | ".join(f"{s:.1f} million" for s in speeds) + " |")
    return "\n".join(lines)
