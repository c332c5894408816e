"""`hotexperts bench`: speed through caches of several sizes, and how much is possible."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hotexperts.bench.domains import DOMAINS
from hotexperts.bench.earlier import read_earlier
from hotexperts.bench.shapes import SHAPES, VLLM_SHAPES, Shape, find_shape
from hotexperts.cli import console, groups, lists, options
from hotexperts.cli.bench_report import bench_report
from hotexperts.cli.expert_options import EXPERTS, ExpertOptions
from hotexperts.config import AUTO, parse_cache_size
from hotexperts.errors import ConfigError
from hotexperts.policy import DEFAULT_POLICY

_OF_SHAPES = {"layers", "traces", "sequences"}
_OF_DISK = {"expert_ram_gib", "expert_ram_policy", "expert_pack"}
_OF_MODELS = {*_OF_DISK, "dtype", "expert_store", "domain", "trust_remote_code"}
_NOT_VLLMS = {  # and what it does anyway
    "device": ("cuda",),
    "cache_mode": (AUTO, "device"),
    "prefetch": ("off",),
}


@groups.expanded
def bench(
    call: typer.Context,
    model: options.Model = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Instead of a model: {', '.join(SHAPES)} with random weights; in vLLM, with "
            f"mxfp4: {', '.join(VLLM_SHAPES)}.",
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
        lists.option(
            f"Of a model: what it reads: {', '.join(DOMAINS)}.", default="all", metavar="NAMES"
        ),
    ] = None,
    expert_cache_size: Annotated[
        list[str] | None,
        lists.option(
            "Slots a layer, or budgets such as 6GiB; in vLLM slots.",
            default="auto; in vLLM a quarter and half of the experts",
        ),
    ] = None,
    batch: lists.Batches = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps of decode after each prompt.")] = 64,
    policy: options.Policy = DEFAULT_POLICY,
    device: options.Device = None,
    expert_options: Annotated[ExpertOptions, groups.without("expert_dtype")] = EXPERTS,
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

    A cache that does not give the resident model's bits gets no speed, and the exit status is 1. Of
    a shape that vLLM runs, log probabilities are compared: its kernels for 4 bits round elsewhere.
    Ctrl-C shows the caches that are done.

    Serial floor: the resident step, then the missed bytes at 0.94 of the link. Percent of bound:
    the longer of the resident step and the missed bytes over the link, in parts of the step.
    """
    with console.errors_as_one_line(debug):
        expert_options.check_fixed_store()
        name, found_shape = _find_shape(call, model, shape, layers)
        asked = {
            **_lists(expert_cache_size, batch, domain),
            "traces": traces,
            "num_groups": sequences,
            "prompt_tokens": prompt_tokens,
            "steps": steps,
            "has_resident": not no_resident,
            "trust_remote_code": trust_remote_code,
            "load_options": expert_options.for_load(
                device=device,
                dtype=dtype,
                policy=policy,
                no_host_memory_check=no_host_memory_check,
            ),
        }
        path = None if shape is not None else options.model_path(model)
        earlier = None if compare is None else read_earlier(compare)

        from hotexperts.cli.benchmark import Benchmark, run_benchmark

        data = run_benchmark(Benchmark(path, found_shape, name, **asked), earlier)
    if as_json:
        console.show_json(data)
    else:
        console.show(bench_report(data))
    if "stopped" in data:
        typer.echo("stopped; caches that were done by then are shown", err=True)
        raise typer.Exit(console.EXIT_INTERRUPTED)
    if any(row.get("verified") is False for row in data["rows"]):
        raise typer.Exit(console.EXIT_DIFFERENT)


def _find_shape(
    call: typer.Context, model: str | None, name: str | None, layers: int | None
) -> tuple[str | None, Shape | None]:
    """The shape and its name, where one is asked for.

    Raises:
        ConfigError: a model beside it, an option that this kind does not take, or no such shape.
    """
    if name is not None and model is not None:
        raise ConfigError(f"give MODEL ({model}) or --shape {name}, not both")
    kind, others = ("--shape", _OF_SHAPES) if name is None else ("a model", _OF_MODELS)
    given = options.given_names(call)
    for each in given:
        if each in others:
            raise ConfigError(f"{options.option_of(each)} is for {kind}: leave it out")
    if name is None:
        return None, None
    found, shape = find_shape(name, layers)
    if call.params["prefetch"] == "router":
        raise ConfigError(
            f"--prefetch router says nothing of --shape {found}, whose routers repeat what was "
            "recorded and guess nothing: take --prefetch lift, which goes by ids, or a model"
        )
    for each in given if shape.is_of_vllm else ():
        if each in _NOT_VLLMS and call.params[each] not in _NOT_VLLMS[each]:
            raise ConfigError(
                f"{options.option_of(each)} cannot be had with --shape {found}, which vLLM runs: "
                "leave it out"
            )
    return found, shape


def _lists(
    sizes: list[str] | None, batches: list[str] | None, domains: list[str] | None
) -> dict[str, Any]:
    """The options that take several values.

    Raises:
        ConfigError: one of the values is none.
    """
    for size in (found_sizes := lists.split("--expert-cache-size", sizes, ())):
        parse_cache_size(size)
    for each in (found_domains := lists.split("--domain", domains, list(DOMAINS))):
        lists.check_choice("--domain", each, list(DOMAINS))
    found_batches = lists.numbers("--batch", batches, [1])
    if 0 in found_batches:
        raise ConfigError("--batch 0: give at least 1")
    return {"sizes": found_sizes, "batches": found_batches, "domains": found_domains}
