"""A sweep's counts as the plain rows that are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotexperts.simulate.cost import Cost
from hotexperts.simulate.fractional import FractionalStats
from hotexperts.simulate.prefetch import PrefetchStats
from hotexperts.simulate.sweep import BELADY, FRAME, Cell, Counts, Sweep
from hotexperts.stats import CacheStats


def sweep_rows(
    sweep: Sweep,
    counts: Counts,
    num_steps: Mapping[tuple[str, int], int],
    cost: Cost,
    nbytes_of: Mapping[str, int | None],
) -> list[dict[str, Any]]:
    """One plain row for each replay that was asked for; None stands for what is not known.

    Args:
        sweep: what was replayed.
        counts: from `run_sweep`.
        num_steps: from `count_steps`.
        cost: of misses and layers.
        nbytes_of: from `expert_sizes`.
    """
    rows = []
    for cell in sweep.cells(sweep.policies):
        steps, nbytes = num_steps[cell.trace, cell.batch], nbytes_of[cell.trace]
        shape = sweep.traces[cell.trace].num_layers, steps, cell.batch
        time = bound = None
        if nbytes is not None and steps:
            best = counts[cell._replace(policy=BELADY, predictor=None)]
            bound = cost.bound_ms_per_token(best.misses * nbytes, *shape)
        if cell.predictor is not None:
            amounts = _prefetched(sweep, counts, cell)
            time = _prefetched_ms(counts[cell], steps, cell.batch)
        else:
            missed = None if nbytes is None else _missed_nbytes(counts[cell], nbytes)
            amounts = {"miss_bytes": missed}
            if missed is not None and steps:
                time = cost.ms_per_token(missed, *shape)
        rows.append({**_counted(counts, cell), **amounts, **_timed(time, bound)})
    return rows


def _timed(ms: float | None, bound_ms: float | None) -> dict[str, float | None]:
    """Nothing to copy and nothing to compute takes no time, and has no speed."""
    return {
        "est_ms_per_token": ms,
        "est_tokens_per_second": 1000 / ms if ms else None,
        "percent_of_bound": 100 * bound_ms / ms if ms and bound_ms is not None else None,
    }


def _counted(counts: Counts, cell: Cell) -> dict[str, Any]:
    stats = counts[cell]
    parts = {"part_hits": stats.part_hits} if isinstance(stats, FractionalStats) else {}
    return {
        **{name: value for name, value in cell._asdict().items() if name != "predictor"},
        "demands": stats.demands,
        "hits": stats.hits,
        "hit_ratio": stats.hit_rate if stats.demands else None,
        "gap_to_belady_closed": gap_closed(counts, cell),
        **parts,
    }


def _missed_nbytes(stats: CacheStats, nbytes: int) -> int:
    if isinstance(stats, FractionalStats):
        return stats.missed_nbytes(nbytes)
    return stats.misses * nbytes


def _resident(stats: CacheStats) -> float:
    """Demanded experts that were there, two halves as one."""
    return stats.resident if isinstance(stats, FractionalStats) else stats.hits


def _prefetched_ms(stats: CacheStats, num_steps: int, batch: int) -> float | None:
    assert isinstance(stats, PrefetchStats)
    return None if stats.ms is None or not num_steps else stats.ms / num_steps / batch


def _prefetched(sweep: Sweep, counts: Counts, cell: Cell) -> dict[str, Any]:
    stats, nbytes = counts[cell], sweep.nbytes_of.get(cell.trace)
    assert isinstance(stats, PrefetchStats)
    return {
        "miss_bytes": None if nbytes is None else (stats.misses - stats.covered) * nbytes,
        "predictor": cell.predictor,
        "misses": stats.misses,
        "issued": stats.issued,
        "covered": stats.covered,
        "late": stats.late,
        "wasted": stats.wasted,
        "wasted_bytes": None if nbytes is None else stats.wasted * nbytes,
        "relative_bytes": stats.relative_bytes if stats.misses else None,
        "stall_free_hit_ratio": stats.stall_free_rate if stats.demands else None,
        "layers_off": stats.num_off,
    }


def gap_closed(counts: Counts, cell: Cell) -> float | None:
    """How far from LRU (0.0) to Belady (1.0) the hits are; None where Belady has no more."""
    lru, best = (counts[cell._replace(policy=policy, predictor=None)].hits for policy in FRAME)
    return (_resident(counts[cell]) - lru) / (best - lru) if best > lru else None
