"""Tables of `bench/results/`, one function each, for the pages that show them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "bench/results"


@cache
def load(result: str) -> Any:
    """A result."""
    return json.loads((RESULTS / f"{result}.json").read_text())


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [names, *rows]
    shown = ["".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in lines]
    return "\n".join([shown[0], "|---" * len(names) + "|", *shown[1:]])


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def spread(row: dict[str, float], digits: int) -> str:
    median, lowest, highest = (f"{row[name]:.{digits}f}" for name in ("median", "min", "max"))
    return f"{median} ({lowest}, {highest})"


def decode_table() -> str:
    names = ("case", "tokens/s (lowest, highest)", "slots a layer", "hit rate", "peak GPU memory")
    rows = (
        (
            case,
            spread(row["tokens_per_s"], 2),
            str(row.get("capacity", "")),
            percent(row.get("hit_rate")),
            f"{row['peak_gpu_bytes'] / 2**30:.2f} GiB",
        )
        for case, row in load("core-decode")["cases"].items()
    )
    return table(names, rows)


def device_table() -> str:
    rows = []
    for case, row in load("device-decode")["cases"].items():
        speed = row["tokens_per_s"]
        speed = speed["median"] if isinstance(speed, dict) else speed
        mean = f"{row['step_ms_mean']:.2f}" if "step_ms_mean" in row else ""
        shown = f"{speed:.{1 if speed >= 10 else 2}f}"
        rows.append((case, shown, mean, str(row.get("capacity", "")), percent(row.get("hit_rate"))))
    return table(("case", "tokens/s", "ms a step (mean)", "slots a layer", "hit rate"), rows)


def guesses_table() -> str:
    """What guesses of known quality gain over none."""
    names = {
        "off": "no prefetch",
        "perfect": "every guess right",
        "router": "83 % of guesses right",
        "wrong": "every guess wrong",
    }
    rows = []
    for case, row in load("prefetch-decode")["cases"]["packed12"]["runs"].items():
        slots, _, how = case.partition(", ")
        gain = f"{row['gain_ms']:+.2f} ms" if "gain_ms" in row else ""
        of = percent(row["of_perfect"]) if "of_perfect" in row else ""
        rows.append((slots, names[how], f"{row['ms']:.2f} ms", gain, of))
    return table(("", "", "a step", "gained", "of what perfect ones gain"), rows)


def tiers_table() -> str:
    """Experts small in host memory: what kernels deliver of them, and decode with them."""
    cases = load("tiers-gpu")["cases"]
    forms = cases["forms"]["forms"]
    rows = []
    for name, found in forms.items():
        row = cases.get(name, {})
        speed = f"{row['tokens_per_s']:.1f}" if row else ""
        host = f"{row['host_bytes'] / 1e9:.2f} GB" if row else ""
        delivered = f"{found['gb_s']:.1f} GB/s"
        rows.append((f"`{name}`", f"{found['part_of_bytes']:.2f}", delivered, host, speed))
    head = ("experts as", "of bf16's bytes", "into slots", "host memory", "tokens/s")
    return table(head, rows)


def prefill_table() -> str:
    names = {
        "resident": "every expert on the GPU",
        "all": "64 slots a layer, all hit",
        "quarter-adv": "16 slots a layer",
        "quarter-adv-packed12": "16 slots a layer, packed on the way",
    }
    rows = []
    for case, row in load("device-prefill")["cases"].items():
        cells = [names[case]]
        for found in row["prefill"].values():
            part = f" ({percent(found['part_of_link'])} of the link)" if found["gb_s"] else ""
            cells.append(f"{found['ms']['median']:.0f} ms{part}")
        rows.append(cells)
    return table(("", "512 tokens", "2048", "8192"), rows)


def _median(seconds: dict[str, float]) -> str:
    return f"{seconds['median']:.2f}"


def load_table() -> str:
    names = {
        "transformers": "Transformers alone",
        "file": "experts left in the file",
        "ram": "experts copied into memory",
    }
    results = load("core-load")
    rows = [
        (names[way], _median(row["seconds"]), f"{row['over_torch'] / 1e9:.2f} GB")
        for way, row in results["ways"].items()
    ]
    if cold := results.get("cold"):
        rows.append(("the same, files not in the page cache", _median(cold["ram"]), ""))
        rows.append(("a plain read of those files", _median(cold["read"]), ""))
    return table(("way", "seconds", "memory"), rows)


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
    return _vllm_rows(
        "vllm-decode",
        {
            "stock vLLM, every expert on the GPU": ("stock", "stock"),
            "the same in the engine below": ("cache", "resident"),
            "128 slots (all)": ("cache", "128 slots"),
            "96 slots": ("cache", "96 slots"),
            "64 slots": ("cache", "64 slots"),
            "32 slots": ("cache", "32 slots"),
            "16 slots": ("cache", "16 slots"),
            "vLLM's UVA offload of experts": ("uva", "uva"),
        },
    )


def eager_table() -> str:
    """The host-managed cache without graphs, and what it differs in from the one above."""
    return _vllm_rows(
        "vllm-decode-plain",
        {
            "32 slots, managed on the GPU, in a graph": ("cache", "32 slots"),
            "32 slots, managed on the GPU, `lru`, without graphs": (
                "eager",
                "eager device, 32 slots",
            ),
            "32 slots, managed on the host, `lru`, without graphs": (
                "eager",
                "eager host, 32 slots",
            ),
            "every expert on the GPU, without graphs": ("eager", "eager resident"),
        },
        ("batch 1",),
    )


def _vllm_rows(
    result: str,
    ways: dict[str, tuple[str, str]],
    columns: tuple[str, ...] = ("batch 1", "batch 8", "batch 32", "prefill"),
) -> str:
    cases = load(result)["cases"]
    rows = (
        (name, *(vllm_cell(cases[case]["runs"].get(f"{way}, {column}")) for column in columns))
        for name, (case, way) in ways.items()
    )
    return table(("", *columns), rows)


def vllm_cell(run: dict[str, Any] | None) -> str:
    if run is None:
        return ""
    is_partial = run.get("hit_rate", 1) < 0.999
    return f"{run['ms']:.1f} ms" + (f" ({percent(run['hit_rate'])} hits)" if is_partial else "")


def policy_tables() -> str:
    """A table a trace, policies by their mean, bounds last; the best of each column in bold."""
    tables = []
    for trace, columns in load("policies")["hit_rates"].items():
        bounds = ("belady-atomic", "belady")
        names = [name for name in next(iter(columns.values())) if name not in bounds]
        names.sort(key=lambda name: -sum(column[name] for column in columns.values()))
        best = {title: max(column[n] for n in names) for title, column in columns.items()}
        rows = []
        for name in (*names, *bounds):
            cells = [f"`{name}`"]
            for title, column in columns.items():
                shown = f"{100 * column[name]:.1f}"
                is_best = name in names and shown == f"{100 * best[title]:.1f}"
                cells.append(f"**{shown}**" if is_best else shown)
            rows.append(cells)
        tables.append(table((trace, *columns), rows))
    return "\n\n".join(tables)


def recording_table() -> str:
    """What recording costs a decode step."""
    ways = load("trace-recording")["ways"]
    rows = ((f"{way} recording", spread(row["step_ms"], 1)) for way, row in ways.items())
    return table(("", "ms a step (lowest, highest)"), rows)


def bytes_table() -> str:
    """Missed bytes a step of the default and of `auto`, as parts of LRU's."""
    policies = ("lru", "auto", "adv")

    def cell(row: dict[str, float]) -> str:
        return f"{row['missed_bytes_per_step'] / 1e6:.0f} MB ({percent(row['of_lru'])})"

    rows = (
        (case, *(cell(row[name]) for name in policies))
        for case, row in load("missed-bytes")["cases"].items()
    )
    return table(("", *(f"`{name}`" for name in policies)), rows)


def plan_table() -> str:
    """What bookkeeping on the device costs a layer where nothing is missed."""
    rows = []
    for case, row in load("device-plan")["all_hits_us_per_layer"].items():
        name = case.replace(" E=", ", ").replace(" C=", ", ").replace(" ids=", ", ")
        rows.append((name.replace("empty", "an empty kernel"), spread(row, 2)))
    return table(("policy, experts, slots, ids", "us a layer (lowest, highest)"), rows)


def copies_table() -> str:
    """What the copy engine and the kernel reach, by the size of an expert and their number."""

    def cell(row: dict[str, Any], name: str) -> str:
        return f"{row[name]:.1f} GB/s" if name in row else ""

    rows = (
        (size, count, *(cell(row, f"{way} x{count}") for way in ("copy_", "gather", "packed12")))
        for size, row in load("device-plan")["copies"].items()
        for count in ("1", "2", "4", "8")
    )
    return table(
        ("bytes of an expert", "experts", "`copy_`", "kernel", "kernel, packed rows, as bf16"), rows
    )


def replay_table() -> str:
    """Millions of demands a minute that one core replays."""
    policies = load("simulate-speed")["policies"]
    columns = list(next(iter(policies.values())))

    def cell(row: dict[str, Any]) -> str:
        return f"{row['demands_a_minute']['median'] / 1e6:.1f} million"

    rows = ((f"`{name}`", *(cell(row[c]) for c in columns)) for name, row in policies.items())
    return table(("policy", *columns), rows)
