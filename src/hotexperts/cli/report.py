"""Reports: from the plain dictionary that `--json` prints to what people read."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hotexperts.config import format_bytes
from hotexperts.stats import CacheStats

Data = dict[str, Any]
_BAR_WIDTH = 20


def stats_data(stats: CacheStats) -> Data:
    """Counters and hit rate; a rate of nothing is None, as JSON has no NaN."""
    return {**stats.as_dict(), "hit_rate": stats.hit_rate if stats.demands else None}


def run_report(data: Data) -> RenderableType:
    """The report of one answer of `hotexperts run`.

    Args:
        data: what `hotexperts.cli.generate.Session.answer` returns.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, value in (
        ("model", f"{data['model']} ({data['model_class']}, {data['dtype']}, {data['device']})"),
        ("cache", _cache(data["cache"])),
        ("policy", _policy(data["cache"])),
        ("experts", _experts(data["stats"])),
        ("shadows", _shadows(data["stats"])),
        ("disk", _disk(data["stats"])),
        ("prefetch", _prefetch(data["stats"])),
        ("speed", _speed(data)),
        ("GPU memory" if data["device"] != "cpu" else "memory", _device_memory(data["memory"])),
        ("host", _host_memory(data)),
    ):
        if value:
            table.add_row(name, Text(value))
    return Group(Padding(table, (1, 0)), _layers(data["layers"]))


def run_line(data: Data) -> str:
    """The same in one line, for a prompt loop."""
    return f"[{_speed(data)}; {_experts(data['stats'])}]"


def verify_report(data: Data) -> RenderableType:
    """The report of `hotexperts verify`.

    Args:
        data: what `hotexperts.cli.compare.verify_model` returns.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("slots a layer", "result", "hit rate", "hits", "misses"):
        table.add_column(name, justify="left" if name == "result" else "right")
    for row in data["capacities"]:
        stats = row["stats"]
        table.add_row(
            f"{row['capacity']} of {data['num_experts']}",
            _result(row, data["tolerance"]),
            _percent(stats["hit_rate"]),
            str(stats["hits"]),
            str(stats["misses"]),
        )
    return Group(Text(_verify_title(data)), table, *map(Text, _differences(data)))


def _cache(cache: Data) -> str:
    return (
        f"{cache['capacity']} of {cache['num_experts']} experts in each of {cache['num_layers']} "
        f"layers; {cache['reason']}"
    )


def _policy(cache: Data) -> str:
    return f"{cache['policy']}, run by the {cache['mode_reason'] or cache['mode']}"


def _experts(stats: Data) -> str:
    return (
        f"{_percent(stats['hit_rate'])} hits ({stats['hits']} hits, {stats['misses']} misses, "
        f"{stats['evictions']} evictions), {format_bytes(stats['bytes_moved'])} moved"
    )


def _shadows(stats: Data) -> str:
    """What others would have hit; empty where nobody counts that."""
    if "lru_hits" not in stats or not (demands := stats["hits"] + stats["misses"]):
        return ""
    lru, best = (_percent(stats[name] / demands) for name in ("lru_hits", "best_shadow_hits"))
    return f"{lru} hits under LRU, {best} under each layer's best shadow"


def _disk(stats: Data) -> str:
    """What came from disk; empty where no experts are there."""
    if "disk_reads" not in stats:
        return ""
    hits, reads = stats["ram_hits"], stats["disk_reads"]
    rate = _percent(hits / (hits + reads) if hits + reads else None)
    return (
        f"{rate} of the copied were in memory ({hits} in memory, {reads} read), "
        f"{format_bytes(stats['disk_bytes'])} read"
    )


def _prefetch(stats: Data) -> str:
    """What was copied ahead, and what it was good for; empty where nothing is."""
    if "prefetches" not in stats:
        return ""
    issued, used, nbytes = (stats[f"prefetch{of}"] for of in ("es", "_hits", "_bytes"))
    taken = format_bytes(stats["prefetch_saved_bytes"])
    return (
        f"{issued} experts begun ahead, {used} of them used ({format_bytes(nbytes)}, {taken} of it "
        f"taken); {stats['prefetching_layers']} layers guess now"
    )


def _speed(data: Data) -> str:
    seconds = data["seconds"]
    text = (
        f"{len(data['token_ids'])} tokens, first after {seconds['prefill']:.2f} s "
        f"({data['num_prompt_tokens']} of prompt)"
    )
    rate = data["decode_tokens_per_second"]
    return text if rate is None else f"{text}, then {rate:.1f} tok/s"


def _device_memory(memory: Data) -> str:
    lift = memory["lift_nbytes"]
    tables = f"{format_bytes(lift)} lift tables, " if lift else ""
    text = (
        f"{format_bytes(memory['slots_nbytes'])} slots, {format_bytes(memory['banks_nbytes'])} "
        f"banks, {tables}{format_bytes(memory['other_nbytes'])} other weights"
    )
    peak = memory["peak_device_nbytes"]
    return text if peak is None else f"{text}; {format_bytes(peak)} at most, everything included"


def _host_memory(data: Data) -> str:
    memory, seconds = data["memory"], data["seconds"]["load"]
    was = data["cache"].get("dequantised")
    read = f"dequantised as read from {was}" if was else ""
    notes = (data["cache"]["packing_report"], read, data["cache"]["held"])
    said = "".join(f", {note}" for note in notes if note)
    every = format_bytes(memory["expert_nbytes"])
    in_memory = f"{format_bytes(memory['host_nbytes'])} of experts in host memory{said}"
    where = {
        "ram": in_memory,
        "file": f"{every} of experts left in the checkpoint file{said}",
        "disk": f"{every} of experts on disk, {in_memory}",
    }[data["cache"]["store"]]
    reason = data["cache"].get("store_reason")
    why = f" ({reason})" if reason else ""
    return f"{where}{why}; loaded in {seconds:.1f} s"


def _layers(layers: list[Data]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    has_prefetch = any("prefetches" in layer for layer in layers)
    ahead = ("ahead", "used", "guessed") if has_prefetch else ()  # instead of bars: 80 columns
    for name in ("layer", "hits", "misses", *ahead, "hit rate", *(() if has_prefetch else ("",))):
        table.add_column(name, justify="left" if name in ("layer", "") else "right")
    for layer in layers:
        table.add_row(
            layer["name"],
            str(layer["hits"]),
            str(layer["misses"]),
            *(_ahead(layer) if has_prefetch else ()),
            _percent(layer["hit_rate"]),
            *(() if has_prefetch else (_bar(layer["hit_rate"]),)),
        )
    return table


def _bar(rate: float | None) -> ProgressBar:
    return ProgressBar(total=1.0, completed=rate or 0.0, width=_BAR_WIDTH)


def _ahead(layer: Data) -> tuple[str, str, str]:
    is_on = "on" if layer["prefetching_layers"] else "off"
    return str(layer["prefetches"]), str(layer["prefetch_hits"]), is_on


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"


def _result(row: Data, tolerance: float) -> str:
    if row["first_difference"] is None:
        return "identical"
    return f"within {tolerance:g}" if row["passed"] else "DIFFERENT"


def _verify_title(data: Data) -> str:
    return (
        f"{data['model']}: cached against resident, {data['algorithm']}, {data['dtype']}, "
        f"{data['device']}, {data['num_prompt_tokens']} tokens of prompt and "
        f"{data['num_tokens']} generated, {data['num_layers']} layers, {data['policy']} run by "
        f"the {data['cache_mode_reason'] or data['cache_mode']}"
    )


def _differences(data: Data) -> list[str]:
    lines = []
    for row in data["capacities"]:
        first = row["first_difference"]
        if first is not None:
            lines.append(
                f"{row['capacity']} slots: first difference at token position "
                f"{first['position']}, {first['where']}, max abs {_number(first)}; logits differ "
                f"by at most {row['max_abs_logits']}, {row['num_equal_tokens']} of "
                f"{data['num_tokens']} tokens are the same"
            )
    return lines


def _number(first: Data) -> str:
    value = first["max_abs_difference"]
    return "not a number" if value is None else f"{value:g}"
