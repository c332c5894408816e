"""Many replays at once: traces x batches x slots x policies, with LRU and Belady as the frame."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from hotexperts.config import Bytes
from hotexperts.errors import ConfigError, HotExpertsError
from hotexperts.simulate.bounds import BOUNDS, bound
from hotexperts.simulate.cost import NO_COST, Cost, expert_nbytes
from hotexperts.simulate.foretell import check_predictor
from hotexperts.simulate.fractional import FRACTIONAL, check_fractional, replay_fractional
from hotexperts.simulate.players import player
from hotexperts.simulate.prefetch import NO_PREFETCH, Prefetch
from hotexperts.simulate.prefetch_replay import replay_prefetch
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
    predictor: str | None = None


Counts = dict[Cell, CacheStats]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to replay: every policy with every size and batch on every trace.

    Attributes:
        traces: by name.
        policies: as `replay` takes them, `FRACTIONAL`, or one of `BOUNDS`.
        capacities: slots a layer, or bytes of all layers; none takes an eighth, a quarter and
            half of a trace's experts.
        batches: lanes.
        prefill: see `replay`.
        rules: see `replay`.
        predictors: with which each policy that is no bound is replayed again.
        prefetch: how these are.
        cost: what prefetch hides behind.
        nbytes_of: from `expert_sizes`; capacities in bytes need it, and prefetch but where slack is
            unlimited.
    """

    traces: Mapping[str, Trace]
    policies: Sequence[str]
    capacities: Sequence[int | Bytes] = ()
    batches: Sequence[int] = (1,)
    prefill: Prefill = "warm"
    rules: Rules = ENGINE
    predictors: Sequence[str] = ()
    prefetch: Prefetch = NO_PREFETCH
    cost: Cost = NO_COST
    nbytes_of: Mapping[str, int | None] = field(default_factory=dict)

    def capacities_of(self, name: str) -> Sequence[int]:
        """The slots of a layer for one trace.

        Raises:
            ConfigError: bytes that hold no slot for each layer, or of experts of unknown size.
        """
        num_experts = self.traces[name].num_experts
        if not self.capacities:
            return sorted({max(1, num_experts // part) for part in (8, 4, 2)})
        return list(dict.fromkeys(self._slots(name, size) for size in self.capacities))

    def _slots(self, name: str, size: int | Bytes) -> int:
        if isinstance(size, int):
            return size
        nbytes, num_layers = self.nbytes_of.get(name), self.traces[name].num_layers
        if nbytes is None:
            raise ConfigError("a cache in bytes: give --expert-mb, an expert's size, or slots")
        if size.num_bytes < num_layers * nbytes:
            raise ConfigError(
                f"{size.num_bytes} bytes are less than one expert of {nbytes} in each of "
                f"{num_layers} layers: give more"
            )
        return min(size.num_bytes // (num_layers * nbytes), self.traces[name].num_experts)

    def cells(self, policies: Sequence[str]) -> Iterator[Cell]:
        """The replays of these policies, in the order of a report."""
        for name in self.traces:
            for batch in self.batches:
                for capacity in self.capacities_of(name):
                    for policy in policies:
                        yield Cell(name, policy, capacity, batch)
                        for predictor in () if policy in BOUNDS else self.predictors:
                            if policy in self.policies:  # not where it is only of the frame
                                yield Cell(name, policy, capacity, batch, predictor)

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
        if policy == FRACTIONAL:
            _check_halves(sweep)
        elif policy not in BOUNDS:
            player(policy, 1, sweep.rules)
    found = {}
    for name, trace in sweep.traces.items():
        try:
            for capacity in sweep.capacities_of(name):
                check_capacity(trace, capacity, sweep.rules)
            preload_uses(trace, sweep.rules)
            _check_prefetch(sweep, name)
            for batch in sweep.batches:
                steps = schedule(trace, batch, sweep.prefill)
                found[name, batch] = sum(step.counted for step in steps)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    return found


def _check_halves(sweep: Sweep) -> None:
    check_fractional(sweep.rules)
    if sweep.predictors:
        raise ConfigError(
            f"policy {FRACTIONAL!r} with prefetch: a staging row holds a whole expert: leave one "
            "of the two out"
        )


def _check_prefetch(sweep: Sweep, name: str) -> None:
    how = sweep.prefetch
    for predictor in sweep.predictors:
        for batch in sweep.batches:
            check_predictor(predictor, sweep.traces[name], batch, how.ahead, how.tap)
    if sweep.predictors:
        how.check(sweep.rules, sweep.cost, sweep.nbytes_of.get(name))


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
        counts[cell] = _count(sweep, cell)
        on_done()
    return counts


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


def _count(sweep: Sweep, cell: Cell) -> CacheStats:
    trace, prefill, rules = sweep.traces[cell.trace], sweep.prefill, sweep.rules
    if cell.predictor is not None:
        return replay_prefetch(
            trace,
            cell.policy,
            cell.capacity,
            cell.predictor,
            sweep.prefetch,
            cell.batch,
            prefill,
            rules,
            sweep.cost,
            sweep.nbytes_of.get(cell.trace),
        ).total
    if cell.policy in BOUNDS:
        return bound(cell.policy, trace, cell.capacity, cell.batch, prefill, rules).total
    if cell.policy == FRACTIONAL:
        return replay_fractional(trace, cell.capacity, cell.batch, prefill, rules).total
    return replay(trace, cell.policy, cell.capacity, cell.batch, prefill, rules).total


def _in_processes(
    sweep: Sweep, cells: list[Cell], jobs: int, on_done: Callable[[], None]
) -> Counts:
    context = multiprocessing.get_context("spawn")  # fork is unsafe beside a progress bar's thread
    pool = ProcessPoolExecutor(jobs, context, initializer=_hold, initargs=(sweep,))
    try:
        with _ctrl_c_for_us_alone():
            futures = {pool.submit(_count_held, cell): cell for cell in cells}
        for future in as_completed(futures):
            future.result()
            on_done()
        return {cell: future.result() for future, cell in futures.items()}
    except BrokenProcessPool as error:
        raise HotExpertsError(
            f"one of {jobs} processes was killed, perhaps for memory: give fewer jobs"
        ) from error
    except BaseException:
        _end(pool)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _ctrl_c_for_us_alone() -> Iterator[None]:
    """Processes that begin inside do not see it, and show no traceback: we end them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(pool: ProcessPoolExecutor) -> None:
    """End what is being replayed for nobody: a pool waits for it otherwise, for minutes perhaps."""
    for process in list((pool._processes or {}).values()):  # public from Python 3.14 on
        process.terminate()


def _hold(sweep: Sweep) -> None:
    global _held
    _held = sweep


def _count_held(cell: Cell) -> CacheStats:
    assert _held is not None
    return _count(_held, cell)
