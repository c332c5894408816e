"""`hotexperts plan`: does a model fit a machine, with how many slots, and how fast would it be?"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

import typer
from rich.table import Table

from hotexperts.cli import console, options
from hotexperts.config import format_bytes, parse_bytes
from hotexperts.errors import ConfigError

if TYPE_CHECKING:
    from hotexperts.plan.forecast import Forecast
    from hotexperts.plan.machine import Machine
    from hotexperts.plan.model import ModelFacts
    from hotexperts.plan.split import Parallel, Split

Rows: TypeAlias = "list[tuple[str, str]]"
_CONTEXT = 8192
_SLOW_LINK_GB_S, _SLOW_MEMORY_GB_S = 12.0, 300.0  # of a machine that nothing is said of


def plan(
    model: Annotated[
        str, typer.Argument(help="Folder with config.json and safetensors; only headers are read.")
    ],
    vram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="GPU memory to use, such as 8GiB.", show_default="the GPU's"
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="The host's memory, such as 64GiB.", show_default="enough"
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Such as 'RTX 4090': its memory and link.", show_default=False
        ),
    ] = None,
    link_gb_s: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Copies to the GPU, as `doctor` measures them.", min=0.1, max=1e4
        ),
    ] = None,
    memory_gb_s: Annotated[
        float | None, typer.Option(metavar="X", help="Of the GPU's own memory.", min=1.0, max=1e6)
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of each sequence.",
            show_default="8192, or as many as the model has positions",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=64, help="Sequences at once.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, max=64, help="GPUs like this, of one host.")] = 1,
    parallel: Annotated[
        str, typer.Option(metavar="tp|ep", help="Cut every expert, or give each GPU whole ones.")
    ] = "tp",
    gpus_per_link: Annotated[
        int, typer.Option(min=1, max=64, help="GPUs that share a link to the host.")
    ] = 1,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Reckon slots, memory and speed before anything is downloaded to a GPU or loaded.

    Speeds are those of vLLM with its CUDA graphs. Hit rates are replayed on routing drawn for the
    model's shape; recorded routing missed up to 1.9 times as much, which is the worse end. Of
    several GPUs, sizes are each one's, and what they tell each other takes no time.
    """
    with console.errors_as_one_line(debug):
        from hotexperts.plan.forecast import forecast
        from hotexperts.plan.model import read_facts

        split = _split(gpus, parallel, gpus_per_link)
        machine, budget = _machine(gpu, vram, link_gb_s, memory_gb_s)
        facts = read_facts(Path(model))
        tokens = options.context(context, _CONTEXT, facts.max_positions)
        forecast_of = partial(
            forecast,
            facts,
            machine,
            budget_nbytes=budget,
            ram_nbytes=None if ram is None else _bytes("--ram", ram),
            context=tokens,
            batch=batch,
        )
        found = forecast_of(split=split)
        commands = _commands(facts, budget, tokens, batch, found.gpu_nbytes["KV cache"], split)
        if as_json:
            more = {"model": model, "machine": machine._asdict(), "commands": commands}
            console.show_json(asdict(found) | more | {"split": asdict(split)})
            return
        rows = _rows(facts, machine, found, batch)
        if gpus > 1:
            rows += _rows_of_ranks(found, split, forecast_of)
        console.show(_table(rows))
        for command in commands:
            typer.echo(f"  {command}")


def _machine(
    gpu: str | None, vram: str | None, link_gb_s: float | None, memory_gb_s: float | None
) -> tuple[Machine, int]:
    """The GPU, and how much of its memory to use."""
    from hotexperts.plan.machine import Machine, by_name

    if gpu is None and vram is None:
        raise ConfigError(
            "give --gpu NAME, or --vram SIZE and --link-gb-s X (hotexperts doctor measures it)"
        )
    budget = None if vram is None else _bytes("--vram", vram)
    if gpu is not None:
        found = by_name(gpu)
    else:
        assert budget is not None, "one of both is given"
        found = Machine("assumed, as its memory's", budget, _SLOW_MEMORY_GB_S, _SLOW_LINK_GB_S)
    if budget is not None and budget > found.vram_nbytes:
        raise ConfigError(
            f"--vram {vram} is more than the {format_bytes(found.vram_nbytes)} of {found.name}"
        )
    found = found._replace(
        link_gb_s=link_gb_s or found.link_gb_s, memory_gb_s=memory_gb_s or found.memory_gb_s
    )
    return found, budget or int(0.9 * found.vram_nbytes)


def _bytes(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def _split(gpus: int, parallel: str, gpus_per_link: int) -> Split:
    from hotexperts.plan.split import Split

    if gpus == 1 and parallel != "tp":
        raise ConfigError(f"--parallel {parallel} is for several GPUs: give --gpus 2 or more")
    return Split(gpus, cast("Parallel", parallel), gpus_per_link)


def _commands(
    facts: ModelFacts, budget: int, context: int, batch: int, kv_nbytes: int, split: Split
) -> list[str]:
    gib, name = f"{budget / 2**30:.4g}", shlex.quote(facts.name)
    several = f" --tensor-parallel-size {split.num_gpus}" if split.num_gpus > 1 else ""
    several += " --enable-expert-parallel" if split.parallel == "ep" else ""
    found = [
        f"vllm serve {name} --moe-expert-cache-gib {gib} --max-model-len {context} "
        f"--max-num-seqs {batch} --kv-cache-memory-bytes {kv_nbytes}{several}"
    ]
    if not facts.is_quantised and not several:  # Transformers would hold them in 16 bits
        found.append(f"hotexperts run {name} --expert-cache-gib {gib} --context {context}")
    return found


def _rows(facts: ModelFacts, machine: Machine, found: Forecast, batch: int) -> Rows:
    return [
        ("fits", f"{found.capacity} of {facts.layers[0].num_experts} experts in each MoE layer"),
        ("", found.reason),
        ("GPU", _parts(found.gpu_nbytes)),
        ("host", f"{format_bytes(found.host_nbytes)} of experts"),
        ("link", f"{machine.link_gb_s:g} GB/s ({machine.name})"),
        ("memory", f"{machine.memory_gb_s:g} GB/s"),
        ("hits", f"{_range(found.hit_rate, 100)} %"),
        ("missed", f"{_range(found.missed_gb, 1)} GB a step"),
        ("decode", f"{_range(found.decode_tokens_per_s, 1)} tokens/s, batch {batch}"),
        ("bound", f"{_number(found.bound_tokens_per_s)} tokens/s, with all copies hidden"),
        ("prefill", f"at most {found.prefill_tokens_per_s:,.0f} tokens/s"),
        ("limit", found.limit),
    ]


def _rows_of_ranks(found: Forecast, split: Split, forecast_of: Callable[..., Forecast]) -> Rows:
    """Of several GPUs: what each holds and copies, and the other way of splitting experts."""
    other = replace(split, parallel="tp" if split.parallel == "ep" else "ep")
    try:
        otherwise = _speed(forecast_of(split=other))
    except ConfigError as error:
        otherwise = str(error)
    share = format_bytes(found.host_nbytes // split.num_gpus)
    links = "its own" if split.gpus_per_link == 1 else f"one of {split.gpus_per_link} on its"
    return [
        ("GPUs", f"{split.num_gpus}, {_way(split)}: {share} of experts each, {links} link"),
        ("each", _speed(found)),
        ("or", f"{_way(other)}: {otherwise}"),
        ("", "what GPUs tell each other is not counted"),
    ]


def _way(split: Split) -> str:
    return "a part of every expert" if split.parallel == "tp" else "whole experts"


def _speed(found: Forecast) -> str:
    waves = _range(found.waves, 1)
    return (
        f"{found.capacity} slots, copies {_range(found.copy_ms, 1)} ms a step, {waves} kernel "
        f"{'call' if waves == '1' else 'calls'} a layer, at most "
        f"{_range(found.decode_tokens_per_s, 1)} tokens/s"
    )


def _table(rows: Rows) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(name, value)
    return table


def _parts(nbytes: dict[str, int]) -> str:
    return ", ".join(f"{format_bytes(n)} {name}" for name, n in nbytes.items())


def _range(pair: Any, factor: float) -> str:
    low, high = (_number(factor * value) for value in sorted(pair))
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
