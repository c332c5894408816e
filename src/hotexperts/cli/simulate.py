"""`hotexperts simulate`: what would which policy have hit, on recorded routing?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperCommand

import hotexperts
from hotexperts.cli import console, foretold, lists, options
from hotexperts.cli.simulate_report import simulate_report
from hotexperts.config import Bytes
from hotexperts.errors import ConfigError
from hotexperts.plain_file import other_than_file
from hotexperts.policy import DEFAULT_POLICY, POLICIES

if TYPE_CHECKING:
    from hotexperts.simulate.rules import Pool, Rules, Sequences, Ties
    from hotexperts.simulate.schedule import Prefill
    from hotexperts.simulate.sweep import Sweep

_BOUNDS = ("belady", "belady-atomic", "belady-forced", "infinite")
_HALVES = "fractional"
_POLICIES = ("lru", DEFAULT_POLICY, "belady")
_POOLED = ("lru", "ewma", "llru", "belady")  # by default, where DEFAULT_POLICY is no choice
_TIES = ("id", "listed")
_POOLS = ("layer", "global", "split")
_SEQUENCES = ("warm", "cold")
_PREFILLS = ("warm", "seed", "ignore")
_PAGE = ".html"
_PLOTS = (".png", ".svg", ".pdf", _PAGE)
_STDOUT = "-"
_PROMPTS = "trace"  # of --preload
_LISTS = ("--policy", "--cache-size", "--batch")


class Command(TyperCommand):
    """Its lists may also be divided by spaces: `--policy lru adv --batch 1 8`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join what follows an option and is no file."""
        return super().parse_args(ctx, lists.joined(args, _LISTS, _is_value))


def _is_value(word: str) -> bool:
    is_known = word in (*POLICIES.names(), *_BOUNDS, _HALVES, "llru")
    return (is_known or word[:1].isdigit() or ":" in word) and not Path(word).is_file()


def simulate(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE", help="Recorded routing: .npz, .jsonl or .csv (docs/traces.md)."
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help=f"{', '.join(POLICIES.names())}, 'module:Class', {_HALVES}, or one of the bounds "
            f"{', '.join(_BOUNDS)}; with --pool global lru, ewma, llru or a bound. {lists.HELP}",
            show_default=",".join(_POLICIES),
        ),
    ] = None,
    cache_size: Annotated[
        list[str] | None,
        lists.option(
            "Slots a layer, such as 16,32, or bytes of all layers, such as 6GiB; on average, where "
            "layers share.",
            default="an eighth, a quarter and half of the experts",
        ),
    ] = None,
    batch: lists.Batches = None,
    prefill: Annotated[
        str,
        typer.Option(
            metavar="|".join(_PREFILLS),
            help="Play prompts token by token (warm), at once into free slots (seed), or not at "
            "all (ignore); only decode is counted.",
        ),
    ] = "warm",
    ties: Annotated[
        str,
        typer.Option(
            metavar="|".join(_TIES),
            help="Of equal scores the lower id leaves first (id), or the one that the router "
            "listed later (listed).",
        ),
    ] = "id",
    pool: Annotated[
        str,
        typer.Option(
            metavar="|".join(_POOLS),
            help="Slots for each layer alone (layer), for all layers together (global), or more "
            "for the layers that gain more in the first half of the trace (split).",
        ),
    ] = "layer",
    pool_floor: Annotated[
        int, typer.Option(metavar="N", help="Slots that a layer keeps in a global pool.")
    ] = 0,
    preload: Annotated[
        str | None,
        typer.Option(
            metavar="trace|FILE",
            help="Begin with the experts used most in the trace's prompts (trace), or in all of "
            "another trace.",
            show_default="empty slots",
        ),
    ] = None,
    sequences: Annotated[
        str,
        typer.Option(
            metavar="|".join(_SEQUENCES),
            help="Keep the caches when a sequence ends (warm), or empty them (cold).",
        ),
    ] = "warm",
    link_gb_s: Annotated[
        float,
        typer.Option(metavar="X", help="Speed of the link to the slots, 10^9 bytes a second."),
    ] = 55.0,
    compute_ms: Annotated[
        float, typer.Option(metavar="X", help="Milliseconds that a layer computes in a step.")
    ] = 0.0,
    expert_mb: options.ExpertMb = None,
    prefetch: foretold.Predictors = None,
    prefetch_ahead: foretold.Ahead = 1,
    prefetch_tap: foretold.Tap = "output",
    prefetch_budget: foretold.Budget = None,
    prefetch_rows: foretold.Rows = None,
    prefetch_slack: foretold.Slack = "compute",
    moe_share: foretold.MoeShare = 0.5,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE|-",
            help="Write the rows as a JSON list; '-' prints it and nothing else.",
        ),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Draw hit rates over slots, and how evenly experts are used: .html, or .png, .svg "
            "or .pdf (these need matplotlib).",
        ),
    ] = None,
    jobs: options.Jobs = 1,
    debug: options.Debug = False,
) -> None:
    """Replay recorded routing through policies, without a model, and compare their hits.

    The gap closed is 0 % for the hits of LRU and 100 % for those of Belady, who knows the future.
    The bound of the speed is Belady's misses over the link, or the compute where that is longer.
    """
    with console.errors_as_one_line(debug):
        _check_outputs(json_file, plot)
        lists.check_choice("--prefill", prefill, _PREFILLS)
        lists.check_choice("--ties", ties, _TIES)
        lists.check_choice("--pool", pool, _POOLS)
        lists.check_choice("--sequences", sequences, _SEQUENCES)
        policies = lists.split("--policy", policy, _POOLED if pool == "global" else _POLICIES)
        sizes = lists.sizes("--cache-size", cache_size)
        batches = lists.numbers("--batch", batch, (1,))

        from hotexperts.simulate.cost import Cost
        from hotexperts.simulate.rows import sweep_rows
        from hotexperts.simulate.sweep import count_steps, expert_sizes, run_sweep

        cost = Cost(link_gb_s, compute_ms, moe_share)
        predictors = lists.split("--prefetch", prefetch, ())
        how = foretold.settings(
            predictors, prefetch_ahead, prefetch_tap, prefetch_budget, prefetch_rows, prefetch_slack
        )
        foretold.check_beside(predictors, moe_share, plot)
        _need_plotting(plot)
        rules = _rules(ties, pool, pool_floor, sequences, preload)
        sweep = _sweep(traces, policies, sizes, batches, prefill, rules)
        nbytes = expert_sizes(sweep.traces, expert_mb)
        sweep = replace(sweep, predictors=predictors, prefetch=how, cost=cost, nbytes_of=nbytes)
        steps = count_steps(sweep)
        with console.counting("replaying", len(sweep.all_cells())) as on_done:
            counts = run_sweep(sweep, jobs, on_done)
        if plot is not None:
            _draw(sweep, counts, Path(plot))
        _show(sweep_rows(sweep, counts, steps, cost, nbytes), json_file)


def _check_outputs(json_file: str | None, plot: str | None) -> None:
    """Refuse before the long part what could not be written after it."""
    for option, name in (("--json", json_file), ("--plot", plot)):
        if name is None or (name, option) == (_STDOUT, "--json"):
            continue
        options.check_output(option, name)
    if plot is not None and Path(plot).suffix not in _PLOTS:
        raise ConfigError(f"--plot {plot}: end the name in {', '.join(_PLOTS)}")


def _need_plotting(plot: str | None) -> None:
    """Fail for want of matplotlib now, not after the replays."""
    if plot is not None and Path(plot).suffix != _PAGE:
        import matplotlib  # noqa: F401


def _rules(ties: str, pool: str, pool_floor: int, sequences: str, preload: str | None) -> Rules:
    """The options' values, which were checked; a preload from a file is read."""
    from hotexperts.simulate import Rules, read_trace

    heat: Any = preload
    if preload is not None and preload != _PROMPTS:
        _check_name(preload, "--preload ")
        heat = read_trace(preload)
    return Rules(
        cast("Ties", ties), cast("Pool", pool), pool_floor, cast("Sequences", sequences), heat
    )


def _sweep(
    names: list[str],
    policies: list[str],
    sizes: list[int | Bytes],
    batches: list[int],
    prefill: str,
    rules: Rules,
) -> Sweep:
    from hotexperts.simulate import read_trace
    from hotexperts.simulate.sweep import Sweep

    for name in names:
        _check_name(name)
    traces = {name: read_trace(name) for name in names}
    return Sweep(traces, policies, sizes, batches, cast("Prefill", prefill), rules)


def _check_name(name: str, option: str = "") -> None:
    options.check_text(name, f"{option}the name of a trace")
    if Path(name).is_file():
        return
    if not option and (name.isdecimal() or name in (*POLICIES.names(), *_BOUNDS, _HALVES, "llru")):
        raise ConfigError(f"{name} is no trace: separate values by commas: --policy lru,adv")
    found = other_than_file(Path(name))
    wrong = "no such file" if found is None else f"{found} is there"
    raise ConfigError(f"{option}{name}: {wrong}: give a trace in .npz, .jsonl or .csv")


def _draw(sweep: Sweep, counts: Any, path: Path) -> None:
    try:
        if path.suffix == _PAGE:
            from hotexperts.page.of_sweep import sweep_page

            path.write_bytes(
                sweep_page(sweep, counts).render(f"hotexperts {hotexperts.__version__}")
            )
        else:
            from hotexperts.cli.curves import draw_curves

            draw_curves(sweep, counts, path)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}: name another file") from error


def _show(rows: list[dict[str, Any]], json_file: str | None) -> None:
    if json_file == _STDOUT:
        console.show_json(rows)
        return
    console.show(simulate_report(rows))
    if json_file is not None:
        try:
            Path(json_file).write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise ConfigError(
                f"--json {json_file} cannot be written: {error}: name another file"
            ) from error
