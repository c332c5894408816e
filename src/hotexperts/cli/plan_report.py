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


class Row(NamedTuple):
    """A size, and what to expect of it, or why it does not fit."""

    budget_nbytes: int
    forecast: Forecast | None
    refusal: str | None


def one_table(facts: ModelFacts, machine: Machine, found: Forecast, batch: int) -> Table:
    """Everything about one size."""
    table = Table.grid(padding=(0, 2))
    num_experts = facts.layers[0].num_experts
    for name, value in (
        ("fits", f"{found.capacity} of {num_experts} experts in each MoE layer"),
        ("", found.reason),
        ("GPU", _parts(found.gpu_nbytes)),
        ("host", f"{format_bytes(found.host_nbytes)} of experts: {_parts(facts.expert_kinds)}"),
        ("machine", _about(machine)),
        ("hits", f"{_range(found.hit_rate, 100)} %"),
        ("missed", f"{_range(found.missed_gb)} GB a step"),
        ("decode", f"{_range(found.decode_tokens_per_s)} tokens/s in vLLM, batch {batch}"),
        ("", _has_loop(facts) and f"{_range(found.loop_tokens_per_s)} tokens/s in Transformers"),
        ("bound", f"{_number(found.bound_tokens_per_s)} tokens/s, with all copies hidden"),
        (
            "prefill",
            f"{_range(found.prefill_tokens_per_s)} tokens/s, {found.prefill_tokens} a step",
        ),
        ("limit", found.limit),
    ):
        if value:
            table.add_row(name, escape(value))
    return table


def sizes_table(facts: ModelFacts, machine: Machine, rows: list[Row], batch: int) -> Table:
    """A line a size."""
    title = f"{facts.name}, batch {batch}; {_about(machine)}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=escape(title), title_justify="left")
    has_loop = _has_loop(facts)
    headings = ["GPU memory", "slots", "hits", "vLLM", "Transformers", "prefill"]
    for heading in headings if has_loop else [h for h in headings if h != "Transformers"]:
        unit = {"slots": "a layer", "hits": "%", "GPU memory": ""}.get(heading, "tokens/s")
        table.add_column(f"{heading}\n{unit}", justify="right", no_wrap=True)
    for row in rows:
        size, found = format_bytes(row.budget_nbytes), row.forecast
        if found is None:
            table.add_row(size, "too small")
            continue
        slots = f"{found.capacity} of {facts.layers[0].num_experts}"
        speeds = [found.decode_tokens_per_s, found.loop_tokens_per_s, found.prefill_tokens_per_s]
        shown = [_range(pair) for pair in (speeds if has_loop else speeds[::2])]
        cells = [cell.replace(" to ", "-") for cell in (_range(found.hit_rate, 100), *shown)]
        table.add_row(size, slots, *cells)
    return table


def _has_loop(facts: ModelFacts) -> bool:
    """Whether Transformers would hold the experts as they are."""
    return not (facts.is_quantised or facts.is_gguf)


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
