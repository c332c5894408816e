"""`hotexperts verify`: is a cached model the same as the resident one, value by value?"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from hotexperts.cli import console, groups, lists, options, report
from hotexperts.cli.expert_options import EXPERTS, ExpertOptions
from hotexperts.config import parse_cache_size
from hotexperts.policy import DEFAULT_POLICY


class Algorithm(str, Enum):
    """Which of Transformers' implementations multiplies, on both sides."""

    EAGER = "eager"
    BATCHED_MM = "batched_mm"
    GROUPED_MM = "grouped_mm"


@groups.expanded
def verify(
    model: options.Model = None,
    expert_cache_size: Annotated[
        list[str] | None,
        lists.option(
            "Slots a layer, 'auto', or budgets such as 6GiB.",
            default="1, a quarter, half and all of the experts",
        ),
    ] = None,
    device: options.Device = None,
    dtype: options.WeightsDtype = options.Dtype.AUTO,
    algorithm: Annotated[
        Algorithm, typer.Option(help="Transformers' implementation that multiplies, on both sides.")
    ] = Algorithm.EAGER,
    tokens: Annotated[int, typer.Option(min=1, help="Greedy tokens to generate.")] = 16,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text before them.", show_default="32 random ids"),
    ] = None,
    policy: options.Policy = DEFAULT_POLICY,
    expert_options: Annotated[ExpertOptions, groups.without("expert_dtype")] = EXPERTS,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="X",
            help="Largest absolute difference of a logit that passes; 0 compares every bit of "
            "every layer's output and of the logits.",
        ),
    ] = 0.0,
    trust_remote_code: options.TrustRemoteCode = False,
    no_host_memory_check: options.NoHostMemoryCheck = False,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Compare a cached model with the resident one, layer by layer and token by token.

    The steps of plain Transformers are repeated through caches of several sizes.

    The exit status is 0 where all agree, 1 where one does not.

    A model that does not fit the GPU is compared on the CPU: give --device cpu.
    """
    with console.errors_as_one_line(debug):
        sizes = lists.split("--expert-cache-size", expert_cache_size, ())
        for size in sizes:
            parse_cache_size(size)
        expert_options.check_fixed_store()
        load_options = expert_options.for_load(
            device=device,
            dtype=dtype,
            policy=policy,
            no_host_memory_check=no_host_memory_check,
        )
        options.check_text(prompt or "", "--prompt")
        path = options.model_path(model)

        from hotexperts.cli.compare import Comparison, verify_model

        data = verify_model(
            Comparison(
                path,
                sizes,
                algorithm.value,
                tokens,
                prompt,
                tolerance,
                trust_remote_code,
                load_options,
            )
        )
    if as_json:
        console.show_json(data)
    else:
        console.show(report.verify_report(data))
    if not data["passed"]:
        raise typer.Exit(console.EXIT_DIFFERENT)
