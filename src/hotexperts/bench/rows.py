"""Rows of a benchmark: from what was timed and counted to speeds, hit rates and bounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from hotexperts.bench.bound import bound
from hotexperts.bench.decode import Taken
from hotexperts.bench.machine import spread
from hotexperts.stats import CacheStats, total

Row = dict[str, Any]
Found = list[tuple[str, Taken]]  # the first group cold, then the others and the first again
_Size = TypeVar("_Size")


def name_of(first: int, batch: int) -> str:
    """Of sequences that are decoded together."""
    return f"sequences {first} to {first + batch - 1}" if batch > 1 else f"sequence {first}"


def add_each(
    rows: list[Row], sizes: Iterable[_Size], measured: Callable[[_Size], list[Row]]
) -> dict[str, Any]:
    """Add the rows of each cache. Ctrl-C leaves those of the caches that are done.

    Args:
        rows: where to.
        sizes: of the caches.
        measured: gives the rows of one.

    Returns:
        `stopped`, true, where Ctrl-C came; nothing else.

    Raises:
        KeyboardInterrupt: it came before a cache was done.
    """
    num_before = len(rows)
    try:
        for size in sizes:
            rows += measured(size)
    except KeyboardInterrupt:
        if len(rows) == num_before:
            raise
        return {"stopped": True}
    return {}


def resident_row(found: Found, batch: int, prompt_tokens: int) -> Row:
    """Speeds of the groups that a warm cache is measured on; nothing is ever cold here."""
    warm = [taken for _, taken in found[1:]]
    return {"warm": _speed(warm, batch, prompt_tokens), "peak_gpu_bytes": _peak()}


def cached_row(
    found: Found,
    batch: int,
    prompt_tokens: int,
    resident_ms: tuple[float, float] | None,
    link: float,
) -> Row:
    """Speeds, hits and bounds, cold and warm; and warm hit rates of each group.

    Args:
        found: what was taken.
        batch: rows of each group.
        prompt_tokens: of each row.
        resident_ms: of the resident model's prefill and step; None leaves bounds open.
        link: GB/s.
    """
    (_, cold), *rest = found
    row: Row = {"peak_gpu_bytes": _peak()}
    for start, taken in (("cold", [cold]), ("warm", [each for _, each in rest])):
        row[start] = _speed(taken, batch, prompt_tokens)
        row[start] |= _hits(taken, row[start], resident_ms, link)
    row["groups"] = [{"name": name, "hit_rate": _rate(taken.decode)} for name, taken in rest]
    return row


def _speed(taken: Sequence[Taken], batch: int, prompt_tokens: int) -> Row:
    """Means, as the bound compares bytes a step; and the steps' spread."""
    steps = [ms for each in taken for ms in each.step_ms]
    prefill_ms, step_ms = statistics.fmean(t.prefill_ms for t in taken), statistics.fmean(steps)
    return {
        "prefill_ms": prefill_ms,
        "prefill_tokens_per_s": 1e3 * batch * prompt_tokens / prefill_ms,
        "step_ms": step_ms,
        "step_ms_spread": spread(steps),
        "tokens_per_s": 1e3 * batch / step_ms,
        "num_steps": len(steps),
    }


def _hits(
    taken: Sequence[Taken],
    speed: Row,
    resident_ms: tuple[float, float] | None,
    link: float,
) -> Row:
    decode = total(each.decode for each in taken)
    num_steps = sum(len(each.step_ms) for each in taken)
    missed = decode.bytes_moved / num_steps
    prefill_missed = total(each.prefill for each in taken).bytes_moved / len(taken)
    row: Row = {
        "hit_rate": _rate(decode),
        "bytes_per_step": missed,
        "prefill_bytes": prefill_missed,
        "serial_floor_ms": None,
        "percent_of_bound": None,
        "prefill_percent_of_bound": None,
    }
    if decode.disk_bytes is not None:
        row["disk_bytes_per_step"] = decode.disk_bytes / num_steps
    if decode.prefetches is not None:
        row["prefetches_per_step"] = decode.prefetches / num_steps
        row["prefetch_hits_per_step"] = (decode.prefetch_hits or 0) / num_steps
        row["prefetch_bytes_per_step"] = (decode.prefetch_bytes or 0) / num_steps
        row["prefetch_saved_bytes_per_step"] = (decode.prefetch_saved_bytes or 0) / num_steps
    if resident_ms is not None:
        prefill_base, step_base = resident_ms
        floor, percent = bound(speed["step_ms"], step_base, missed, link)
        row |= {"serial_floor_ms": floor, "percent_of_bound": percent}
        of_prefill = bound(speed["prefill_ms"], prefill_base, prefill_missed, link)
        row["prefill_percent_of_bound"] = of_prefill.percent_of_bound
    return row


def _rate(stats: CacheStats) -> float | None:
    return stats.hit_rate if stats.demands else None


def _peak() -> int | None:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
