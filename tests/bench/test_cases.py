"""Rows of an earlier run that a script keeps beside those that it measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import cases


def test_other_rows_are_kept_with_what_they_ran_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "found.json"
    ran_on = {"date": "2026-01-02", "commit": "abc"}
    earlier = {"slow": {"ms": 2}, "again": {"ms": 3}, "broken": {"failed": 1}}
    out.write_text(json.dumps({"machine": {**ran_on, "gpu": "one"}, "cases": earlier}))
    monkeypatch.setattr(cases, "_child", lambda case: {"ms": 1})
    monkeypatch.setattr(sys, "argv", ["bench.py", "--keep"])

    benchmark = cases.Benchmark(
        "a-b", ("again",), lambda *_: {}, {}, lambda table: {"n": len(table)}
    )
    args = ["--out", str(out), "--keep"]
    cases.run(benchmark, cases.parser(None, needs_traces=False).parse_args(args))

    found = json.loads(out.read_text())
    assert found["cases"] == {"slow": {"measured_at": ran_on, "ms": 2}, "again": {"ms": 1}}
    assert found["n"] == 2


def test_rows_stand_as_the_benchmark_lists_them() -> None:
    table = {"c": {}, "other": {}, "a": {}}
    assert list(cases._in_order(table, ("a", "b", "c"))) == ["a", "c", "other"]


def test_a_run_that_is_ended_leaves_no_child(tmp_path: Path) -> None:
    script, started = tmp_path / "slow.py", tmp_path / "pid"
    script.write_text(
        "import os, pathlib, time, cases\n"
        "def measure(case, args):\n"
        f"    pathlib.Path({str(started)!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(100)\n"
        "benchmark = cases.Benchmark('slow', ('x',), measure, {}, lambda table: {})\n"
        "cases.run(benchmark, cases.parser(None, needs_traces=False).parse_args())\n"
    )
    where = {**os.environ, "PYTHONPATH": str(Path(cases.__file__).parent)}
    parent = subprocess.Popen([sys.executable, str(script)], env=where)
    deadline = time.monotonic() + 60
    while not (started.exists() and started.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.terminate()
    assert parent.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_keeping_needs_a_file(tmp_path: Path) -> None:
    benchmark = cases.Benchmark("a-b", ("x",), lambda *_: {}, {}, lambda table: {})
    args = ["--out", str(tmp_path / "none.json"), "--keep"]
    with pytest.raises(SystemExit, match=r"none\.json is not there"):
        cases.run(benchmark, cases.parser(None, needs_traces=False).parse_args(args))
