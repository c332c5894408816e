"""`hotexperts bench`: speed through caches of several sizes, and how much is possible."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotexperts.bench.domains import DOMAINS
from hotexperts.bench.earlier import read_earlier
from hotexperts.bench.shapes import SHAPES, find_shape
from hotexperts.cli import console, lists, options
from hotexperts.cli.bench_report import bench_report
from hotexperts.config import AUTO, DEFAULT_PACKING, DEFAULT_RAM_POLICY, parse_cache_size
from hotexperts.errors import ConfigError
from hotexperts.policy import DEFAULT_POLICY

_OF_SHAPES = {"layers", "traces", "sequences"}
_OF_DISK = {"expert_ram_gib", "expert_ram_policy", "expert_pack"}
_OF_MODELS = {*_OF_DISK, "dtype", "expert_store", "domain", "trust_remote_code"}


def bench(
    call: typer.Context,
    model: options.Model = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Instead of a model: {', '.join(SHAPES)} with random weights.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Of a shape: only as many layers.", show_default="all"
        ),
    ] = None,
    traces: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|FILE",
            help="Of a shape: recorded routing that its routers repeat (docs/traces.md).",
            show_default="drawn, as by trace --synthetic fitted",
        ),
    ] = None,
    sequences: Annotated[
        int, typer.Option(metavar="N", min=1, help="Of a shape: groups of sequences to decode.")
    ] = 4,
    domain: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help=f"Of a model: what it reads: {', '.join(DOMAINS)}. {lists.HELP}",
            show_default="all",
        ),
    ] = None,
    expert_cache_size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST",
            help=f"Slots a layer, or budgets such as 6GiB. {lists.HELP}",
            show_default="auto",
        ),
    ] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST",
            help=f"Sequences decoded together, such as 1,8. {lists.HELP}",
            show_default="1",
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps of decode after each prompt.")] = 64,
    policy: options.Policy = DEFAULT_POLICY,
    device: options.Device = None,
    expert_store: options.ExpertStore = options.Store.RAM,
    expert_ram_gib: options.ExpertRamGib = None,
    expert_ram_policy: options.ExpertRamPolicy = DEFAULT_RAM_POLICY,
    expert_pack: options.ExpertPack = None,
    expert_packing: options.ExpertPackingName = DEFAULT_PACKING,
    cache_mode: options.CacheModeName = AUTO,
    dtype: options.WeightsDtype = options.Dtype.AUTO,
    no_resident: Annotated[
        bool,
        typer.Option(
            "--no-resident",
            help="Leave out the resident model, where it does not fit: nothing is verified then, "
            "and no bound is known.",
        ),
    ] = False,
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="EARLIER.json",
            help="Show what changed since then; what --json printed.",
            show_default=False,
        ),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    no_host_memory_check: options.NoHostMemoryCheck = False,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Measure load, prefill and decode through a cache, cold and warm, beside the resident model.

    A cache that does not give the resident model's bits gets no speed, and the exit status is 1.

    Serial floor: the resident step, then the missed bytes at 0.94 of the link. Percent of bound:
    the longer of the resident step and the missed bytes over the link, in parts of the step.
    """
    with console.errors_as_one_line(debug):
        _check_given(call, model, shape)
        sizes = lists.split("--expert-cache-size", expert_cache_size, [AUTO])
        for size in sizes:
            parse_cache_size(size)
        batches = lists.numbers("--batch", batch, [1])
        if 0 in batches:
            raise ConfigError("--batch 0: give at least 1")
        domains = lists.split("--domain", domain, list(DOMAINS))
        for each in domains:
            lists.check_choice("--domain", each, list(DOMAINS))
        options.check_fixed_store(expert_store)
        load_options = options.load_options(
            device=device,
            dtype=dtype,
            policy=policy,
            store=expert_store,
            ram_gib=expert_ram_gib,
            ram_policy=expert_ram_policy,
            pack=expert_pack,
            packing=expert_packing,
            mode=cache_mode,
            no_host_memory_check=no_host_memory_check,
        )
        name, found_shape = (None, None) if shape is None else find_shape(shape, layers)
        earlier = None if compare is None else read_earlier(compare)

        from hotexperts.cli.benchmark import Benchmark, run_benchmark

        data = run_benchmark(
            Benchmark(
                model=None if shape is not None else options.model_path(model),
                shape=found_shape,
                shape_name=name,
                traces=traces,
                num_groups=sequences,
                domains=domains,
                sizes=sizes,
                batches=batches,
                prompt_tokens=prompt_tokens,
                steps=steps,
                has_resident=not no_resident,
                trust_remote_code=trust_remote_code,
                load_options=load_options,
            ),
            earlier,
        )
    if as_json:
        console.show_json(data)
    else:
        console.show(bench_report(data))
    if any(row.get("verified") is False for row in data["rows"]):
        raise typer.Exit(console.EXIT_DIFFERENT)


def _check_given(call: typer.Context, model: str | None, shape: str | None) -> None:
    """Refuse a model and a shape together, and options that only the other kind takes.

    Raises:
        ConfigError: either.
    """
    if shape is not None and model is not None:
        raise ConfigError(f"give MODEL ({model}) or --shape {shape}, not both")
    kind, names = ("--shape", _OF_SHAPES) if shape is None else ("a model", _OF_MODELS)
    for name in options.given_names(call):
        if name in names:
            raise ConfigError(f"{options.option_of(name)} is for {kind}: leave it out")
