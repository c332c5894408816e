"""A forecast for people: one size in full, or several, one a line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.markup import escape
from rich.table import Table

from hotexperts.config import format_bytes

if TYPE_CHECKING:
    from hotexperts.plan.forecast import Forecast
    from hotexperts.plan.machine import Machine
    from hotexperts.plan.model import ModelFacts
    from hotexperts.plan.split import Split


class Job(NamedTuple):
    """What is forecast, but for sizes."""

    facts: ModelFacts
    machine: Machine
    tokens: int
    batch: int
    split: Split

    def num_experts(self) -> int:
        """Of a layer, those of which a GPU has something."""
        from hotexperts.plan.split import part_of

        return part_of(self.facts, self.split).layers[0].num_experts

    def has_loop(self) -> bool:
        """Whether Transformers would hold the experts as they are, on one GPU."""
        return self.split.num_gpus == 1 and not (self.facts.is_quantised or self.facts.is_gguf)


class Row(NamedTuple):
    """A size, and what to expect of it, or why it does not fit."""

    budget_nbytes: int
    forecast: Forecast | None
    refusal: str | None


def one_table(job: Job, found: Forecast, other: Row | None) -> Table:
    """Everything about one size.

    Args:
        job: what was asked.
        found: the forecast.
        other: of several GPUs, what the other way of splitting experts would give.
    """
    table = Table.grid(padding=(0, 2))
    for name, value in _lines(job, found) + (_lines_of_ranks(job, found, other) if other else []):
        if value:
            table.add_row(name, escape(value))
    return table


def _lines(job: Job, found: Forecast) -> list[tuple[str, str]]:
    kinds = _parts(job.facts.expert_kinds)
    loop = found.loop_tokens_per_s if job.has_loop() else None
    prefill = _range(found.prefill_tokens_per_s)
    return [
        ("fits", f"{found.capacity} of {job.num_experts()} experts in each MoE layer"),
        ("", found.reason),
        ("GPU", _parts(found.gpu_nbytes)),
        ("host", f"{format_bytes(found.host_nbytes)} of experts: {kinds}"),
        ("machine", _about(job.machine)),
        ("hits", f"{_range(found.hit_rate, 100)} %"),
        ("missed", f"{_range(found.missed_gb)} GB a step"),
        ("decode", f"{_range(found.decode_tokens_per_s)} tokens/s in vLLM, batch {job.batch}"),
        ("", f"{_range(loop)} tokens/s in Transformers" if loop else ""),
        ("bound", f"{_number(found.bound_tokens_per_s)} tokens/s, with all copies hidden"),
        ("prefill", f"{prefill} tokens/s, {found.prefill_tokens} a step"),
        ("limit", found.limit),
    ]


def _lines_of_ranks(job: Job, found: Forecast, other: Row) -> list[tuple[str, str]]:
    """Of several GPUs: what each holds and copies, and the other way of splitting experts."""
    split = job.split
    share = format_bytes(found.host_nbytes // split.num_gpus)
    links = "its own" if split.gpus_per_link == 1 else f"one of {split.gpus_per_link} on its"
    otherwise = _speed(other.forecast) if other.forecast else str(other.refusal)
    return [
        ("GPUs", f"{split.num_gpus}, {_way(split)}: {share} of experts each, {links} link"),
        ("each", _speed(found)),
        ("or", f"{_way(split.other_way())}: {otherwise}"),
        ("", "what GPUs tell each other is not counted"),
    ]


def _way(split: Split | None) -> str:
    return "whole experts" if split and split.parallel == "ep" else "a part of every expert"


def _speed(found: Forecast) -> str:
    waves = _range(found.waves)
    return (
        f"{found.capacity} slots, copies {_range(found.copy_ms)} ms a step, {waves} kernel "
        f"{'call' if waves == '1' else 'calls'} a layer, at most "
        f"{_range(found.decode_tokens_per_s)} tokens/s"
    )


def sizes_table(job: Job, rows: list[Row]) -> Table:
    """A line a size."""
    split = job.split
    gpus = f", {split.num_gpus} GPUs, {_way(split)} each" if split.num_gpus > 1 else ""
    title = f"{job.facts.name}, batch {job.batch}{gpus}; {_about(job.machine)}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=escape(title), title_justify="left")
    headings = ["GPU memory", "slots", "hits", "vLLM", "Transformers", "prefill"]
    for heading in headings if job.has_loop() else [h for h in headings if h != "Transformers"]:
        unit = {"slots": "a layer", "hits": "%", "GPU memory": ""}.get(heading, "tokens/s")
        table.add_column(f"{heading}\n{unit}", justify="right", no_wrap=True)
    for row in rows:
        size, found = format_bytes(row.budget_nbytes), row.forecast
        if found is None:
            table.add_row(size, "too small")
            continue
        loop = found.loop_tokens_per_s if job.has_loop() else None
        speeds = (found.decode_tokens_per_s, loop, found.prefill_tokens_per_s)
        shown = [_range(pair) for pair in speeds if pair]
        cells = [cell.replace(" to ", "-") for cell in (_range(found.hit_rate, 100), *shown)]
        table.add_row(size, f"{found.capacity} of {job.num_experts()}", *cells)
    return table


def _about(machine: Machine) -> str:
    return (
        f"{machine.name}: link {machine.link_gb_s:g} GB/s, memory {machine.memory_gb_s:g} GB/s, "
        f"{machine.tflops:g} TFLOP/s"
    )


def _parts(nbytes: dict[str, int]) -> str:
    return ", ".join(f"{format_bytes(n)} {name}" for name, n in nbytes.items())


def _range(pair: Any, factor: float = 1.0) -> str:
    low, high = (_number(factor * value) for value in sorted(pair))
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
