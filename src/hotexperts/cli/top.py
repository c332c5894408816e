"""`hotexperts top`: what a running server's cache does, second by second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.live import Live
from rich.table import Table

from hotexperts.cli import console, options
from hotexperts.observe.rates import Rates, rates, read_totals


def top(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="Where the counters are: http://127.0.0.1:8000/metrics of vLLM."
        ),
    ],
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Between two looks.")
    ] = 1.0,
    link_gb_s: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0.1, help="Show copies as a part of this, as `doctor` measures it."
        ),
    ] = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Watch hit rate, copies and waves a layer call until Ctrl-C; with --json look once.

    LRU and best: the hits that LRU and the policy's best shadow caches would have had, where the
    policy has shadows. In RAM: of the experts to be copied, those that were not read from disk.
    Ahead: copied before a layer asked, the part of it that was taken, and the layers that do so.
    vLLM's workers publish about once a second: shorter intervals show nothing new.
    """
    with console.errors_as_one_line(debug):
        looks = _looks(url, interval)
        if as_json:
            console.show_json({rank: asdict(found) for rank, found in next(looks).items()})
            return
        with suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
            for found in looks:
                live.update(_table(found, link_gb_s), refresh=True)


def _looks(url: str, interval: float) -> Iterator[dict[str, Rates]]:
    before, then = read_totals(url), time.monotonic()
    while True:
        time.sleep(interval)
        after, now = read_totals(url), time.monotonic()
        yield rates(before, after, now - then)
        before, then = after, now


def _table(found: dict[str, Rates], link_gb_s: float | None) -> Table:
    knows_shadows = any(now.lru_hit_rate is not None for now in found.values())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shadows = ("LRU", "best") if knows_shadows else ()
    has_disk = any(now.disk_gb_s is not None for now in found.values())
    rest = ("GB/s", "of link", "missed/s", "passed/s", "evicted/s", "waves")
    disk = ("in RAM", "disk GB/s") if has_disk else ()
    has_prefetch = any(now.prefetch_gb_s is not None for now in found.values())
    ahead = ("ahead GB/s", "taken", "layers") if has_prefetch else ()
    for heading in ("rank", "hits", *shadows, *rest, *disk, *ahead):
        table.add_column(heading, justify="right")
    for rank, now in sorted(found.items()):
        others = (now.lru_hit_rate, now.best_hit_rate) if knows_shadows else ()
        table.add_row(
            rank,
            *map(_percent, (now.hit_rate, *others)),
            f"{now.gb_s:.2f}",
            "-" if link_gb_s is None else f"{now.gb_s / link_gb_s:.0%}",
            f"{now.misses_s:,.0f}",
            f"{now.bypasses_s:,.0f}",
            f"{now.evictions_s:,.0f}",
            _number(now.waves),
            *((_percent(now.ram_hit_rate), _number(now.disk_gb_s)) if has_disk else ()),
            *(_ahead(now) if has_prefetch else ()),
        )
    return table


def _ahead(now: Rates) -> tuple[str, str, str]:
    layers = "-" if now.prefetching_layers is None else str(now.prefetching_layers)
    return _number(now.prefetch_gb_s), _percent(now.prefetch_saved_rate), layers


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"
