"""What `bench` does once it needs torch: find the model and its routing, measure, compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hotexperts.bench.domains import DOMAINS
from hotexperts.bench.earlier import NAME, changes, check_same
from hotexperts.bench.machine import describe
from hotexperts.bench.measure import Wanted, measure
from hotexperts.bench.routing import Routing, find_routing
from hotexperts.bench.shapes import Shape
from hotexperts.bench.sources import CheckpointSource, ShapeSource, Source, check_shape
from hotexperts.cli.console import counting, quiet_libraries
from hotexperts.cli.options import model_label
from hotexperts.cli.report import Data
from hotexperts.cli.text import load_tokenizer
from hotexperts.config import AUTO
from hotexperts.errors import ConfigError
from hotexperts.fields import Fields
from hotexperts.integrations.transformers.options import find_device
from hotexperts.integrations.transformers.positions import max_positions
from hotexperts.integrations.transformers.repository import read_config

_OF_CHECKPOINTS = (  # options that `attach` has not
    "dtype",
    "expert_store",
    "expert_ram_gib",
    "expert_ram_policy",
    "expert_pack",
)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What is asked for.

    Attributes:
        model: path of a checkpoint; None for a shape.
        shape: a shape; None for a checkpoint.
        shape_name: its name.
        traces: routing of a shape; None draws it.
        num_groups: of sequences, for a shape.
        domains: of texts, for a checkpoint.
        sizes: see `Wanted`; none leaves the choice to the engine.
        batches: see `Wanted`.
        prompt_tokens: see `Wanted`.
        steps: see `Wanted`.
        has_resident: see `Wanted`.
        trust_remote_code: run Python code of the checkpoint.
        load_options: of `ExpertOptions.for_load`.
    """

    model: str | None
    shape: Shape | None
    shape_name: str | None
    traces: Path | None
    num_groups: int
    domains: Sequence[str]
    sizes: Sequence[str]
    batches: Sequence[int]
    prompt_tokens: int
    steps: int
    has_resident: bool
    trust_remote_code: bool
    load_options: Mapping[str, Any]


class Job(NamedTuple):
    """A measurement that may begin.

    Attributes:
        about: what is true of all rows.
        num_parts: how often `measure` calls what it is given.
        measure: see `hotexperts.bench.measure.measure`.
    """

    about: Data
    num_parts: int
    measure: Callable[[Callable[[], None]], Data]


def run_benchmark(asked: Benchmark, earlier: Fields | None) -> Data:
    """Measure, and compare with an earlier result where there is one.

    Raises:
        ConfigError: an option that cannot take effect, or an earlier result of something else.
        HotExpertsError: whatever `load` and `attach` refuse.
    """
    shape = asked.shape
    job = _job_in_vllm(asked, shape) if shape and shape.is_of_vllm else _job(asked)
    head = {**job.about, "prompt_tokens": asked.prompt_tokens, "steps": asked.steps}
    if earlier is not None:
        check_same(earlier, head)
    with counting("measuring", job.num_parts) as on_done, quiet_libraries():
        found = job.measure(on_done)
    data = {"benchmark": NAME, **head, "machine": describe(), **found}
    if earlier is not None:
        check_same(earlier, data)
        data["compared"] = changes(earlier, data)
    return data


def _job_in_vllm(asked: Benchmark, shape: Shape) -> Job:
    """Of a shape that vLLM runs."""
    from hotexperts.bench.vllm import options

    _check_positions(asked, shape.sizes["max_position_embeddings"])
    slots = options.slots(asked.sizes, shape)
    options.check_can_run(shape, str(asked.shape_name))
    routing = find_routing(asked.traces, shape, asked.prompt_tokens + asked.steps)
    wanted = options.Asked(
        shape,
        slots,
        asked.batches,
        asked.prompt_tokens,
        asked.steps,
        asked.num_groups,
        asked.has_resident,
        asked.load_options["policy"],
        asked.load_options["expert_packing"],
        asked.load_options["check_host_memory"],
    )

    def measure_in_vllm(on_done: Callable[[], None]) -> Data:
        from hotexperts.bench.vllm.measure import measure

        return measure(wanted, routing, on_done)

    num_parts = len(wanted.sizes) + asked.has_resident
    return Job(_about_shape(asked, shape, routing), num_parts, measure_in_vllm)


def _job(asked: Benchmark) -> Job:
    """Of what Transformers runs."""
    load_options = {**asked.load_options, "device": str(find_device(asked.load_options["device"]))}
    source, about = (
        _of_shape(asked, asked.shape, load_options)
        if asked.shape
        else _of_model(asked, load_options)
    )
    sizes = asked.sizes or [AUTO]
    wanted = Wanted(sizes, asked.batches, asked.prompt_tokens, asked.steps, asked.has_resident)
    return Job(about, len(sizes) + asked.has_resident, partial(measure, source, wanted))


def _of_shape(asked: Benchmark, shape: Shape, load_options: Data) -> tuple[Source, Data]:
    check_shape(shape, load_options)
    routing = find_routing(asked.traces, shape, asked.prompt_tokens + asked.steps)
    options = {name: value for name, value in load_options.items() if name not in _OF_CHECKPOINTS}
    source = ShapeSource(shape, options.pop("device"), routing, asked.num_groups, options)
    return source, _about_shape(asked, shape, routing)


def _about_shape(asked: Benchmark, shape: Shape, routing: Routing) -> Data:
    about = {"model": f"shape of {asked.shape_name}, random weights", "shape": dict(shape.sizes)}
    return {**about, "domains": [], "routing": routing.about}


def _of_model(asked: Benchmark, load_options: Data) -> tuple[Source, Data]:
    path, trust = asked.model, asked.trust_remote_code
    assert path is not None, "a model or a shape"
    config, _ = read_config(path, {"trust_remote_code": trust})
    _check_positions(asked, max_positions(config))
    tokenizer = load_tokenizer(path, trust_remote_code=trust)
    texts = {name: tokenizer(DOMAINS[name])["input_ids"] for name in asked.domains}
    source = CheckpointSource(path, texts, {**load_options, "trust_remote_code": trust})
    about = {"model": model_label(path), "domains": list(texts)}
    return source, {**about, "routing": f"texts: {', '.join(texts)}"}


def _check_positions(asked: Benchmark, most: int | None) -> None:
    wanted = asked.prompt_tokens + asked.steps + 1
    if most is not None and wanted > most:
        raise ConfigError(
            f"--prompt-tokens {asked.prompt_tokens} and --steps {asked.steps} need {wanted} "
            f"positions, the model has {most}: lower one"
        )
