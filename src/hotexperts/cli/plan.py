"""`hotexperts plan`: does a model fit a machine, with how many slots, and how fast would it be?"""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hotexperts.cli import console, lists, options
from hotexperts.cli.plan_report import Job, Row, one_table, sizes_table
from hotexperts.config import format_bytes
from hotexperts.errors import ConfigError

if TYPE_CHECKING:
    from hotexperts.plan.forecast import Forecast
    from hotexperts.plan.machine import Machine
    from hotexperts.plan.split import Parallel, Split

_CONTEXT = 8192
_SLOW = {"memory_gb_s": 300.0, "link_gb_s": 12.0, "tflops": 25.0}  # where nothing is said of it
_OWN_SHARE = 0.9  # of a GPU's memory, where no size is given
_NO_ENGINE = (
    "This is what GGUF's bytes would give in slots. hotexperts run reads qwen2moe and qwen3moe, "
    "into slots of 16 bits a value, of which fewer fit; vLLM with hotexperts reads no GGUF."
)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder with config.json and safetensors, hub id, or .gguf file; only headers "
            "are read.",
        ),
    ],
    vram: Annotated[
        list[str] | None,
        lists.option(
            "GPU memory to use, such as 8GiB; several make a table.",
            default="0.9 of the GPU's",
            metavar="SIZE",
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
    tflops: Annotated[
        float | None,
        typer.Option(metavar="X", help="Of the GPU's matrix units, 16 bits.", min=0.1, max=1e6),
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
    """Reckon slots, memory and speed before any weight is downloaded or loaded.

    Speeds are those of vLLM with its CUDA graphs, and of Transformers' own loop. Hit rates are
    replayed on routing drawn for the model's shape; recorded routing missed up to 2.5 times as
    much, which is the worse end. Of several GPUs, sizes are each one's, and what they tell each
    other takes no time.
    """
    with console.errors_as_one_line(debug):
        from hotexperts.plan.source import read_facts

        split = _split(gpus, parallel, gpus_per_link)
        asked = {"memory_gb_s": memory_gb_s, "link_gb_s": link_gb_s, "tflops": tflops}
        machine, budgets = _machine(gpu, lists.split("--vram", vram, ()), asked)
        ram_nbytes = None if ram is None else options.nbytes("--ram", ram)
        with console.prints_to_stderr():
            facts = read_facts(model)
        tokens = options.context(context, _CONTEXT, facts.max_positions)
        job = Job(facts, machine, tokens, batch, split)
        rows = _rows(job, budgets, ram_nbytes)
        if as_json:
            found = [_as_json(row, job) for row in rows]
            console.show_json(found if len(budgets) > 1 else found[0])
        elif len(budgets) > 1:
            console.show(sizes_table(job, rows))
        else:
            _show_one(rows[0], job, ram_nbytes)


def _show_one(row: Row, job: Job, ram_nbytes: int | None) -> None:
    assert row.forecast is not None, "what does not fit alone is an error"
    other = None
    if (way := job.split.other_way()) is not None:
        other = _row(job._replace(split=way), row.budget_nbytes, ram_nbytes)
    console.show(one_table(job, row.forecast, other))
    for command in _commands(job, row.budget_nbytes, row.forecast):
        typer.echo(f"  {command}")
    if job.facts.is_gguf:
        typer.echo(_NO_ENGINE)


def _rows(job: Job, budgets: list[int], ram_nbytes: int | None) -> list[Row]:
    """A forecast for each size.

    Raises:
        ConfigError: none fits; what the last of them lacks.
    """
    rows = [_row(job, budget, ram_nbytes) for budget in budgets]
    if not any(row.forecast for row in rows):
        raise ConfigError(str(rows[-1].refusal))
    return rows


def _row(job: Job, budget: int, ram_nbytes: int | None) -> Row:
    from hotexperts.plan.forecast import forecast

    try:
        found = forecast(
            job.facts,
            job.machine,
            budget_nbytes=budget,
            ram_nbytes=ram_nbytes,
            context=job.tokens,
            batch=job.batch,
            split=job.split,
        )
    except ConfigError as error:
        return Row(budget, None, str(error))
    return Row(budget, found, None)


def _machine(
    gpu: str | None, sizes: list[str], asked: dict[str, float | None]
) -> tuple[Machine, list[int]]:
    """The GPU, and how much of its memory to use: one size or several."""
    from hotexperts.plan.machine import Machine, by_name

    if gpu is None and not sizes:
        raise ConfigError(
            "give --gpu NAME, or --vram SIZE and --link-gb-s X (hotexperts doctor measures it)"
        )
    budgets = [options.nbytes("--vram", size) for size in sizes]
    if gpu is not None:
        found = by_name(gpu)
    else:
        found = Machine("assumed where not given", max(budgets), **_SLOW)
    for size, budget in zip(sizes, budgets, strict=True):
        if budget > found.vram_nbytes:
            raise ConfigError(
                f"--vram {size} is more than the {format_bytes(found.vram_nbytes)} of "
                f"{found.name}: give at most that, or another --gpu"
            )
    values: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    found = found._replace(**values)
    return found, budgets or [int(_OWN_SHARE * found.vram_nbytes)]


def _split(gpus: int, parallel: str, gpus_per_link: int) -> Split:
    from hotexperts.plan.split import Split

    if gpus == 1 and parallel != "tp":
        raise ConfigError(f"--parallel {parallel} is for several GPUs: give --gpus 2 or more")
    return Split(gpus, cast("Parallel", parallel), gpus_per_link)


def _commands(job: Job, budget: int, found: Forecast) -> list[str]:
    """What runs the model so; nothing for what nothing here reads."""
    if job.facts.is_gguf:
        return []
    gib, name, split = f"{budget / 2**30:.4g}", shlex.quote(job.facts.name), job.split
    several = f" --tensor-parallel-size {split.num_gpus}" if split.num_gpus > 1 else ""
    several += " --enable-expert-parallel" if split.parallel == "ep" else ""
    commands = [
        f"vllm serve {name} --moe-expert-cache-gib {gib} --max-model-len {job.tokens} "
        f"--max-num-seqs {job.batch} --max-num-batched-tokens {found.prefill_tokens} "
        f"--kv-cache-memory-bytes {found.gpu_nbytes['KV cache']}{several}"
    ]
    if job.has_loop():
        commands.append(f"hotexperts run {name} --expert-cache-gib {gib} --context {job.tokens}")
    return commands


def _as_json(row: Row, job: Job) -> dict[str, Any]:
    about = {
        "model": job.facts.name,
        "machine": job.machine._asdict(),
        "split": asdict(job.split),
        "budget_nbytes": row.budget_nbytes,
        "expert_kinds": job.facts.expert_kinds,
    }
    if row.forecast is None:
        return about | {"refusal": row.refusal}
    commands = _commands(job, row.budget_nbytes, row.forecast)
    return asdict(row.forecast) | about | {"commands": commands}
