"""Many replays at once: traces x batches x slots x policies, with LRU and Belady as the frame."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, NamedTuple

from hotexperts.errors import ConfigError, HotExpertsError
from hotexperts.simulate.bounds import BOUNDS, bound
from hotexperts.simulate.cost import Cost, expert_nbytes
from hotexperts.simulate.players import player
from hotexperts.simulate.replay import replay
from hotexperts.simulate.rules import ENGINE, Rules
from hotexperts.simulate.schedule import Prefill, schedule
from hotexperts.simulate.streams import check_capacity, preload_uses
from hotexperts.simulate.trace import Trace, TraceError
from hotexperts.stats import CacheStats

BELADY, LRU = "belady", "lru"
FRAME = (LRU, BELADY)  # always counted: a gap is closed between the two


class Cell(NamedTuple):
    """One replay; `trace` is the trace's name in the sweep."""

    trace: str
    policy: str
    capacity: int
    batch: int


Counts = dict[Cell, CacheStats]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to replay: every policy with every size and batch on every trace.

    Attributes:
        traces: by name.
        policies: as `replay` takes them, or one of `BOUNDS`.
        capacities: slots a layer; none takes an eighth, a quarter and half of a trace's experts.
        batches: lanes.
        prefill: see `replay`.
        rules: see `replay`.
    """

    traces: Mapping[str, Trace]
    policies: Sequence[str]
    capacities: Sequence[int] = ()
    batches: Sequence[int] = (1,)
    prefill: Prefill = "warm"
    rules: Rules = ENGINE

    def capacities_of(self, name: str) -> Sequence[int]:
        """The sizes for one trace."""
        num_experts = self.traces[name].num_experts
        return self.capacities or sorted({max(1, num_experts // part) for part in (8, 4, 2)})

    def cells(self, policies: Sequence[str]) -> Iterator[Cell]:
        """The replays of these policies, in the order of a report."""
        for name in self.traces:
            for batch in self.batches:
                for capacity in self.capacities_of(name):
                    for policy in policies:
                        yield Cell(name, policy, capacity, batch)

    def all_cells(self) -> list[Cell]:
        """The replays that are needed: those that were asked for, and the frame."""
        return list(self.cells(tuple(dict.fromkeys([*FRAME, *self.policies]))))


_held: Sweep | None = None  # a worker process's


def count_steps(sweep: Sweep) -> dict[tuple[str, int], int]:
    """Decode steps by trace and batch; refuses what `run_sweep` could not replay.

    Raises:
        ConfigError: an unknown policy or one against the rules, or slots, lanes or a preload that
            a trace cannot have.
    """
    for policy in sweep.policies:
        if policy not in BOUNDS:
            player(policy, 1, sweep.rules)
    found = {}
    for name, trace in sweep.traces.items():
        try:
            for capacity in sweep.capacities_of(name):
                check_capacity(trace, capacity, sweep.rules)
            preload_uses(trace, sweep.rules)
            for batch in sweep.batches:
                steps = schedule(trace, batch, sweep.prefill)
                found[name, batch] = sum(step.counted for step in steps)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    return found


def run_sweep(sweep: Sweep, jobs: int = 1, on_done: Callable[[], None] = lambda: None) -> Counts:
    """Replay every cell of a sweep that `count_steps` let pass.

    Args:
        sweep: what to replay.
        jobs: processes; 1 stays in this one.
        on_done: called after each replay.

    Raises:
        HotExpertsError: a process was killed.
    """
    cells = sweep.all_cells()
    if jobs > 1:
        return _in_processes(sweep, cells, min(jobs, len(cells)), on_done)
    counts = {}
    for cell in cells:
        counts[cell] = _count(sweep.traces[cell.trace], cell, sweep.prefill, sweep.rules)
        on_done()
    return counts


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
        missed = None if nbytes is None else counts[cell].misses * nbytes
        time = None
        if missed is not None and steps:
            time = cost.ms_per_token(missed, sweep.traces[cell.trace].num_layers, steps, cell.batch)
        rows.append({**_counted(counts, cell), "miss_bytes": missed, "est_ms_per_token": time})
    return rows


def _counted(counts: Counts, cell: Cell) -> dict[str, Any]:
    stats = counts[cell]
    return {
        **cell._asdict(),
        "demands": stats.demands,
        "hits": stats.hits,
        "hit_ratio": stats.hit_rate if stats.demands else None,
        "gap_to_belady_closed": gap_closed(counts, cell),
    }


def gap_closed(counts: Counts, cell: Cell) -> float | None:
    """How far from LRU (0.0) to Belady (1.0) the hits are; None where Belady has no more."""
    lru, best = (counts[cell._replace(policy=policy)].hits for policy in FRAME)
    return (counts[cell].hits - lru) / (best - lru) if best > lru else None


def expert_sizes(
    traces: Mapping[str, Trace], expert_mb: float | None = None
) -> dict[str, int | None]:
    """`expert_nbytes` of each trace.

    Raises:
        ConfigError: a size that no expert has.
        TraceError: the same in a trace, which is named.
    """
    sizes = {}
    for name, trace in traces.items():
        try:
            sizes[name] = expert_nbytes(trace.meta, expert_mb)
        except TraceError as error:
            raise TraceError(f"{name}: {error}") from error
    return sizes


def _count(trace: Trace, cell: Cell, prefill: Prefill, rules: Rules) -> CacheStats:
    if cell.policy in BOUNDS:
        return bound(cell.policy, trace, cell.capacity, cell.batch, prefill, rules).total
    return replay(trace, cell.policy, cell.capacity, cell.batch, prefill, rules).total


def _in_processes(
    sweep: Sweep, cells: list[Cell], jobs: int, on_done: Callable[[], None]
) -> Counts:
    context = multiprocessing.get_context("spawn")  # fork is unsafe beside a progress bar's thread
    pool = ProcessPoolExecutor(jobs, context, initializer=_hold, initargs=(sweep,))
    try:
        futures = {pool.submit(_count_held, cell): cell for cell in cells}
        for future in as_completed(futures):
            future.result()
            on_done()
        return {cell: future.result() for future, cell in futures.items()}
    except BrokenProcessPool as error:
        raise HotExpertsError(
            f"one of {jobs} processes was killed, perhaps for memory: give fewer jobs"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _hold(sweep: Sweep) -> None:
    global _held
    _held = sweep


def _count_held(cell: Cell) -> CacheStats:
    assert _held is not None
    return _count(_held.traces[cell.trace], cell, _held.prefill, _held.rules)
