"""The cases of a benchmark, each in a process of its own, and what is known written after each.

The parent calls its own script again with `--measure CASE`; the last object that this prints is
the case's row. A case that fails has its exit status for a row, and the others go on. A parent that
is ended, by Ctrl-C or `timeout`, ends its child: nothing goes on to use the GPU.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine

Row = dict[str, Any]
Table = dict[str, Row]


@dataclass(frozen=True)
class Benchmark:
    """What a script measures.

    Attributes:
        name: the script's, with hyphens.
        cases: names of what it measures by default, in order.
        measure: one case in this process; called with its name and the script's arguments.
        about: what the results say of all cases.
        compare: called with the rows so far, after each case: adds to them what compares one with
            another, and returns what the results say beside them.
        show: a row in a line.
    """

    name: str
    cases: Sequence[str]
    measure: Callable[[str, argparse.Namespace], Row]
    about: dict[str, Any]
    compare: Callable[[Table], dict[str, Any]]
    show: Callable[[Row], str] = json.dumps


def parser(description: str | None, *, needs_traces: bool = True) -> argparse.ArgumentParser:
    """A parser with what every script takes."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if needs_traces:
        found.add_argument("--traces", type=Path, required=True, help="folder: see docs/traces.md")
    found.add_argument("--out", type=Path, help="result file, written after each case")
    found.add_argument("--cases", nargs="*", help="instead of all")
    found.add_argument("--keep", action="store_true", help="rows that --out has of other cases")
    found.add_argument("--measure", help=argparse.SUPPRESS)
    return found


def run(benchmark: Benchmark, args: argparse.Namespace) -> None:
    """Measure every case that is asked for, or be the child that measures one.

    Raises:
        SystemExit: a case failed.
    """
    if args.measure:
        print(json.dumps(benchmark.measure(args.measure, args)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = args.cases or benchmark.cases
    table = _kept(args.out, names) if args.keep else {}
    for case in names:
        table = _in_order({**table, case: _child(case)}, benchmark.cases)
        done = {name: row for name, row in table.items() if "failed" not in row}
        more = benchmark.compare(done)
        show = benchmark.show if case in done else json.dumps
        print(f"{case:16} {show(table[case])}", flush=True)
        if args.out:
            machine.write(args.out, benchmark.name, {**benchmark.about, "cases": table, **more})
    failed = [case for case, row in table.items() if "failed" in row]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _kept(out: Path | None, names: Sequence[str]) -> Table:
    """Rows of an earlier run, each with what it ran on; failed ones are not worth keeping."""
    if out is None or not out.exists():
        sys.exit(f"--keep takes rows from --out, and {out} is not there: leave it out")
    earlier = json.loads(out.read_text())
    ran_on = {key: earlier["machine"][key] for key in ("date", "commit")}
    return {
        case: {"measured_at": ran_on, **row}
        for case, row in earlier["cases"].items()
        if case not in names and "failed" not in row
    }


def _in_order(table: Table, cases: Sequence[str]) -> Table:
    """As the benchmark lists them, however they were asked for; others last."""
    known = [case for case in cases if case in table]
    return {case: table[case] for case in [*known, *(c for c in table if c not in cases)]}


def _child(case: str) -> Row:
    command = [sys.executable, "-W", "ignore", *sys.argv, "--measure", case]
    # Kills the child, whatever ends the wait for it.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"failed": done.returncode}
    lines = done.stdout.strip().split("\n")
    row: Row = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    return row
