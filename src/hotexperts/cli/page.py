"""`hotexperts report`: a trace, or what another command printed as JSON, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hotexperts
from hotexperts.cli import console, lists, options
from hotexperts.errors import ConfigError
from hotexperts.plain_file import other_than_file
from hotexperts.policy import DEFAULT_POLICY, POLICIES

if TYPE_CHECKING:
    from hotexperts.page.document import Page
    from hotexperts.simulate import Trace

_POLICIES = (DEFAULT_POLICY, "lru", "belady")
_PARTS_OF_EXPERTS = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # sizes of the curves
_TRACES = (".npz", ".jsonl", ".csv")
_OF_TRACES = {"policy", "cache_size", "expert_mb", "jobs"}


def report(
    call: typer.Context,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A trace (.npz, .jsonl, .csv), or the JSON of `run`, `bench` or `simulate`.",
        ),
    ],
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="PAGE.html", help="The page to write.")
    ],
    policy: Annotated[
        list[str] | None,
        lists.option(
            f"Of a trace: {', '.join(POLICIES.names())}, 'module:Class' or belady.",
            default=",".join(_POLICIES),
            metavar="NAMES",
        ),
    ] = None,
    cache_size: Annotated[
        list[str] | None,
        lists.option(
            "Of a trace: slots a layer, such as 8,16,32.",
            default="an eighth, a quarter, half and three quarters of the experts",
        ),
    ] = None,
    expert_mb: options.ExpertMb = None,
    jobs: options.Jobs = 1,
    debug: options.Debug = False,
) -> None:
    """Write one HTML page, which needs no network and runs no script.

    Of a trace: hit rates with LRU and Belady, who is asked for, when misses come.

    Of a command's JSON: configuration, hits of each layer, bytes, percent of bound where known.
    """
    with console.errors_as_one_line(debug):
        path = _check(call, file, out)
        if path.suffix in _TRACES:
            page = _trace_page(path, policy, cache_size, expert_mb, jobs)
        else:
            page = _json_page(path)
        content = page.render(f"hotexperts {hotexperts.__version__}")
        try:
            Path(out).write_bytes(content)
        except OSError as error:
            raise ConfigError(f"--out {out} cannot be written: {error}: name another") from error
    typer.echo(f"{out}: {len(content):,} bytes")


def _check(call: typer.Context, file: str, out: str) -> Path:
    """The file to read; refuse before the long part what could not be written after it."""
    options.check_output("--out", out)
    if Path(out).suffix not in (".html", ".htm"):
        raise ConfigError(f"--out {out}: end the name in .html")
    options.check_text(file, "the name of the file")
    path = Path(file)
    if (kind := other_than_file(path)) is not None:
        raise ConfigError(f"{file}: {kind} is there: give a file, a trace or a command's JSON")
    if not path.is_file():
        raise ConfigError(f"{file}: no such file: give a trace, or the JSON of a command")
    if path.suffix in _TRACES:
        return path
    if path.suffix != ".json":
        raise ConfigError(
            f"{file}: unknown kind: give a trace ({', '.join(_TRACES)}), or a command's .json"
        )
    for name in options.given_names(call):
        if name in _OF_TRACES:
            raise ConfigError(
                f"{options.option_of(name)} is for a trace, and {file} holds results: leave it out"
            )
    return path


def _json_page(path: Path) -> Page:
    from hotexperts.fields import FieldError, read_fields
    from hotexperts.page.of_bench import bench_page
    from hotexperts.page.of_rows import rows_page
    from hotexperts.page.of_run import run_page

    data = read_fields(path)
    if isinstance(data, list):
        return rows_page(data)
    if "benchmark" in data:
        return bench_page(data)
    if "token_ids" in data:
        return run_page(data)
    raise FieldError(
        f"{path} has no field 'token_ids' (of `run --json`) and no field 'benchmark' (of `bench "
        "--json`), and is no list (of `simulate --json`): give one of these"
    )


def _trace_page(
    path: Path,
    policy: list[str] | None,
    cache_size: list[str] | None,
    expert_mb: float | None,
    jobs: int,
) -> Page:
    from hotexperts.page.of_trace import Timeline, trace_page
    from hotexperts.simulate import read_trace
    from hotexperts.simulate.bounds import BOUNDS
    from hotexperts.simulate.cost import Cost
    from hotexperts.simulate.fractional import FRACTIONAL
    from hotexperts.simulate.replay import misses_by_step
    from hotexperts.simulate.rows import sweep_rows
    from hotexperts.simulate.sweep import Sweep, count_steps, expert_sizes, run_sweep

    trace, name = read_trace(path), str(path)
    policies = lists.split("--policy", policy, _POLICIES)
    sizes = lists.numbers("--cache-size", cache_size, _sizes(trace))
    sweep = Sweep({name: trace}, policies, sizes)
    steps, nbytes = count_steps(sweep), expert_sizes(sweep.traces, expert_mb)
    middle = sizes[(len(sizes) - 1) // 2]
    played = list(dict.fromkeys([*(p for p in policies if p not in (*BOUNDS, FRACTIONAL)), "lru"]))
    with console.counting("replaying", len(sweep.all_cells()) + len(played)) as on_done:
        counts = run_sweep(sweep, jobs, on_done)
        misses = {}
        for found in played:
            misses[found] = misses_by_step(trace, found, middle)
            on_done()
    rows = sweep_rows(sweep, counts, steps, Cost(), nbytes)
    return trace_page(name, sweep, counts, rows, Timeline(middle, misses, nbytes[name]))


def _sizes(trace: Trace) -> list[int]:
    return sorted({max(1, round(part * trace.num_experts)) for part in _PARTS_OF_EXPERTS})
