"""What prefetch would do, on recorded routing: recall, coverage of misses, time; needs no GPU.

    python bench/prefetch_simulated.py --traces DIR --out bench/results/prefetch-simulated.json

Three tables. Recall: how much of the next demand is among the 8 and 12 (or k and 2 k) likeliest,
for every look-ahead and tap, in layers whose source is of the same token. Coverage: stall-free hits
with unlimited slack at no more than 1.5 times the bytes. Time: the same where transfers hide behind
stated compute only. Everything is learned from zero while it is replayed. Of moe507m the last 24
sequences are reported: constants were chosen on the others, and on none of the other traces.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import machine
from hotexperts.predict import PREDICTORS, Predictor
from hotexperts.simulate import Trace, belady, read_trace
from hotexperts.simulate.cost import Cost
from hotexperts.simulate.foretell import SIMULATED, has_gate, hints_of
from hotexperts.simulate.prefetch import Prefetch, PrefetchStats
from hotexperts.simulate.prefetch_replay import replay_prefetch
from hotexperts.simulate.schedule import layer_calls, schedule

NUM_TUNED_ON = 24  # sequences of moe507m
LINK_GB_S = 54.0  # bench/results/core-load.json has the like of one machine
POLICY = "adv"


Job = tuple[Callable[..., Any], str, tuple[Any, ...]]


class Case(NamedTuple):
    """A trace, a quarter (or half) of its experts as slots, and guesses to count."""

    file: str
    slots: int
    guesses: tuple[int, int]
    nbytes: int  # of an expert, for the table of time
    compute_ms: float  # of a layer, likewise


CASES = {
    # bf16 experts (of moe507m's routing OLMoE-1B-7B's), and 2.2 ms / 24 of compute a layer
    "Qwen3-30B-A3B": Case("bigmoeonedge_qwen.npz", 32, (6, 12), 9_437_184, 0.092),
    "gpt-oss-120b": Case("bigmoeonedge_gptoss.npz", 32, (2, 4), 49_766_400, 0.092),
    "granite-3.0-1b-a400m": Case("onnxgenai_granite3_1b_a400m.npz", 16, (8, 16), 3_145_728, 0.092),
    "moe507m": Case("moe507m_dev.npz", 16, (8, 12), 12_582_912, 0.092),
}
AHEAD = (1, 2, 3, 4)
BY_IDS = ("previous", "popularity", "temporal-markov", "cross-markov", "cross-lift", "logistic")
WITHOUT_GATE = "combined, ids only"  # where guesses are recorded
COVERING = (*BY_IDS, "stride", "request-map", "gate", "combined", WITHOUT_GATE, "oracle")
TABLES = ("recall", "trained", "coverage", "time")
TIMED = ("gate", "combined", "oracle")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder")
    parser.add_argument("--out", type=Path, required=True, help="result file")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--tables", nargs="+", choices=TABLES, default=TABLES, help="the others stay as they are"
    )
    args = parser.parse_args()
    machine.describe()
    jobs: list[Job] = []
    for name in (name for name, case in CASES.items() if (args.traces / case.file).exists()):
        jobs += [(recall_row, name, at) for at in product(("output", "input"), AHEAD)]
        jobs += [(coverage_row, name, (predictor,)) for predictor in COVERING]
        jobs += [(time_row, name, at) for at in product(TIMED, ("output", "input"), AHEAD)]
        jobs += [(trained_row, name, ())] if name == "moe507m" else []
    for table in args.tables:
        rows = run([job for job in jobs if table_of(job) == table], args.traces, args.jobs)
        write(args.out, table, rows)


def write(out: Path, table: str, rows: list[Any]) -> None:
    """After each table, so that a run that is cut leaves those before."""
    before = json.loads(out.read_text()) if out.exists() else {"measured_at": {}}
    kept = {name: before[name] for name in TABLES if name in before}
    at = before["measured_at"] | {table: machine.describe()["commit"]}
    cases = {name: case._asdict() for name, case in CASES.items()}
    settings = {"policy": POLICY, "link_gb_s": LINK_GB_S, "cases": cases, "measured_at": at}
    tables = {**kept, table: rows}
    ordered = {name: tables[name] for name in TABLES if name in tables}
    machine.write(out, "prefetch-simulated", {**settings, **ordered})


def run(jobs: list[Job], folder: Path, num_processes: int) -> list[Any]:
    """Their rows, in order."""
    rows: list[Any] = []
    with ProcessPoolExecutor(num_processes) as pool:
        waiting = [(job, pool.submit(job[0], folder, job[1], *job[2])) for job in jobs]
        for job, future in waiting:
            rows += future.result()
            print(table_of(job), job[1], *job[2], flush=True)
    return rows


def table_of(job: Job) -> str:
    return job[0].__name__.removesuffix("_row")


def traced(folder: Path, name: str, *, tuned_on: bool = False) -> Trace:
    """The trace; of moe507m the sequences that constants were not chosen on, or those."""
    trace = read_trace(folder / CASES[name].file)
    if name != "moe507m":
        return trace
    numbers = np.unique(trace.seq)
    kept = np.isin(trace.seq, numbers[:NUM_TUNED_ON] if tuned_on else numbers[NUM_TUNED_ON:])
    guesses = {tap: found[kept] for tap, found in trace.guesses.items()}
    return Trace(trace.ids[kept], trace.phase[kept], trace.seq[kept], trace.meta, guesses)


def made(name: str, trace: Trace, ahead: int, tap: str) -> Predictor | None:
    """The predictor, or None where the trace lacks the guesses that it needs."""
    kind = SIMULATED.get(name) or PREDICTORS.load(name)
    with_gate = has_gate(trace, ahead, tap)
    if "gate" in kind.needs and not with_gate:
        return None
    shape = trace.num_layers, trace.num_experts, trace.ids.shape[2]
    return kind(*shape, ahead, with_gate=with_gate)


def recalls(predictor: Predictor, trace: Trace, tap: str, guesses: tuple[int, int]) -> list[float]:
    """The share of decode's demand that is among so many guesses; the predictor learns."""
    found, demands = np.zeros(len(guesses)), 0
    for step in schedule(trace, 1, "warm"):
        for call in layer_calls(trace, [step], *range(trace.num_layers)):
            hints = hints_of(trace, step.tokens, call, tap if predictor.with_gate else None)
            if step.counted and call.layer >= predictor.ahead:
                likeliest = np.argsort(-predictor.guess(call.layer, hints), kind="stable")
                found += [np.isin(call.demand, likeliest[:n]).sum() for n in guesses]
                demands += len(call.demand)
            predictor.observe(call.layer, call.demand, hints)
    return (found / demands).tolist()


def recall_row(folder: Path, name: str, tap: str, ahead: int) -> list[dict[str, Any]]:
    """Every predictor at one tap and look-ahead; by ids alone the tap makes no difference."""
    trace, rows = traced(folder, name), []
    with_gate = has_gate(trace, ahead, tap)
    names = (*BY_IDS, *(("gate", WITHOUT_GATE) if with_gate else ()), "combined")
    if tap == "input":
        names = ("gate", "combined") if with_gate else ()
    for predictor in names:
        replayed, plain_name = as_told(trace, predictor)
        chosen = made(plain_name, replayed, ahead, tap)
        assert chosen is not None
        found = recalls(chosen, replayed, tap, CASES[name].guesses)
        rows.append(
            {"trace": name, "tap": tap, "ahead": ahead, "predictor": predictor}
            | {"gate": chosen.with_gate, "recall": found}
        )
    return rows


def as_told(trace: Trace, predictor: str) -> tuple[Trace, str]:
    """The trace, without guesses where none are to be used, and the predictor's name."""
    if predictor != WITHOUT_GATE:
        return trace, predictor
    return replace(trace, guesses={}), "combined"


def trained_row(folder: Path, name: str) -> list[dict[str, Any]]:
    """The same for predictors that have seen the other sequences before."""
    rows = []
    for predictor, tap in (("gate", "output"), ("combined", "output"), ("combined", "input")):
        trace = traced(folder, name)
        chosen = made(predictor, trace, 1, tap)
        assert chosen is not None
        recalls(chosen, traced(folder, name, tuned_on=True), tap, CASES[name].guesses)
        found = recalls(chosen, trace, tap, CASES[name].guesses)
        rows.append({"trace": name, "tap": tap, "predictor": predictor, "recall": found})
    return rows


def coverage_row(folder: Path, name: str, predictor: str) -> list[dict[str, Any]]:
    """Stall-free hits with unlimited slack, in all layers and in those after the first."""
    trace, case, how = traced(folder, name), CASES[name], Prefetch(slack="unlimited")
    if predictor == WITHOUT_GATE and not trace.guesses:
        return []
    trace, plain_name = as_told(trace, predictor)
    if made(plain_name, trace, how.ahead, how.tap) is None:
        return []
    outcome = replay_prefetch(trace, POLICY, case.slots, plain_name, how)
    bound = belady(trace, case.slots)
    later = outcome.layers[1:]
    free = sum(one.hits + one.covered for one in later) / sum(one.demands for one in later)
    base = sum(one.hits for one in later) / sum(one.demands for one in later)
    total = outcome.total
    return [
        {"trace": name, "predictor": predictor, "hit_rate": total.hit_rate}
        | {"belady": bound.total.hit_rate, "stall_free": total.stall_free_rate}
        | {"relative_bytes": total.relative_bytes, "covered": total.covered / total.misses}
        | {"after_first_layer": {"hit_rate": base, "stall_free": free}}
    ]


def time_row(folder: Path, name: str, predictor: str, tap: str, ahead: int) -> list[dict[str, Any]]:
    """Milliseconds a token with and without prefetch, where only compute hides transfers."""
    trace, case = traced(folder, name), CASES[name]
    if made(predictor, trace, ahead, tap) is None:
        return []
    cost = Cost(LINK_GB_S, case.compute_ms)
    how = Prefetch(ahead, tap)  # type: ignore[arg-type]
    found = replay_prefetch(
        trace, POLICY, case.slots, predictor, how, cost=cost, nbytes=case.nbytes
    ).total
    num_steps = int(trace.phase.sum())
    assert found.ms is not None
    return [
        {"trace": name, "predictor": predictor, "tap": tap, "ahead": ahead}
        | {"ms_per_token": found.ms / num_steps, "ms_without": plain_ms(found, case, cost, trace)}
        | {"stall_free": found.stall_free_rate, "relative_bytes": found.relative_bytes}
        | {"covered": found.covered, "late": found.late, "layers_off": found.num_off}
    ]


def plain_ms(found: PrefetchStats, case: Case, cost: Cost, trace: Trace) -> float:
    """Milliseconds a token without prefetch, whose misses are the same."""
    steps = int(trace.phase.sum())
    return cost.ms_per_token(found.misses * case.nbytes, trace.num_layers, steps, 1)


if __name__ == "__main__":
    main()
