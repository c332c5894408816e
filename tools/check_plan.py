"""Forecasts of `hotexperts plan` beside what benchmarks measured.

    python tools/check_plan.py

Of every row in `bench/results/vllm-decode.json` that misses experts: the forecast for that machine,
shape, batch and number of slots, and how far the measured time is outside of it. Likewise of two
GPUs in `bench/results/two-gpu.json`, where it is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from hotexperts.plan.forecast import step
from hotexperts.plan.machine import Machine, by_name
from hotexperts.plan.model import ModelFacts
from hotexperts.plan.split import Parallel, Split, part_of
from hotexperts.sizing import LayerShape

KV_TOKENS = 200  # a prompt of 64 and what is decoded after it, on average
RESULTS = Path(__file__).parent.parent / "bench/results"


class Compared(NamedTuple):
    """A forecast and what was measured; `outside` is 0 within the range, else in parts of 1."""

    name: str
    forecast_ms: tuple[float, float]
    measured_ms: float
    outside: float


def main() -> None:
    rows = list(compare())
    if (path := RESULTS / "two-gpu.json").exists():
        rows += compare_ranks(json.loads(path.read_text()))
    for row in rows:
        worst, best = row.forecast_ms
        print(
            f"{row.name:32} {best:7.2f} to {worst:7.2f} ms  measured {row.measured_ms:7.2f} ms  "
            f"outside {row.outside:+.0%}"
        )


def compare() -> Iterator[Compared]:
    """One row a measurement."""
    results = json.loads((RESULTS / "vllm-decode.json").read_text())
    facts = qwen3(results["shape"])
    runs = results["cases"]["cache"]["runs"]
    machine = by_name("H200")._replace(link_gb_s=results["cases"]["cache"]["link_gb_s"])
    for name, run in runs.items():
        slots, _, batch = name.partition(" slots, batch ")
        if batch:
            found = _step(facts, machine, int(slots), int(batch), Split())
            yield _compared(name, found, run["ms"])


def compare_ranks(results: dict[str, Any]) -> Iterator[Compared]:
    """The same of `bench/two_gpu.py`; what ranks tell each other is in the measured time alone."""
    facts = qwen3(results["shape"])
    machine = by_name("H200")._replace(link_gb_s=results["link_gb_s"]["together"])
    for way in get_args(Parallel):
        for name, run in results["cases"].get(way, {}).get("runs", {}).items():
            if "ms" in run:
                batch = int(name.rsplit(" ", 1)[-1])
                found = _step(facts, machine, run["slots"], batch, Split(2, way))
                yield _compared(f"{way}, {name}", found, run["ms"])


def _step(
    facts: ModelFacts, machine: Machine, slots: int, batch: int, split: Split
) -> tuple[float, float]:
    kv = KV_TOKENS * batch * part_of(facts, split).kv_nbytes_per_token
    return step(facts, machine, slots, batch, kv, split).ms


def _compared(name: str, found: tuple[float, float], measured: float) -> Compared:
    worst, best = found
    outside = measured / worst - 1 if measured > worst else min(0.0, measured / best - 1)
    return Compared(name, found, measured, outside)


def qwen3(shape: dict[str, int]) -> ModelFacts:
    """What `read_facts` would find in a checkpoint of this shape, bf16."""
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * heads, shape["num_key_value_heads"] * heads
    attention = hidden * (2 * queries + 2 * keys) + hidden * shape["num_experts"]
    other = 2 * (layers * attention + 2 * shape["vocab_size"] * hidden)
    row = 3 * hidden * shape["moe_intermediate_size"] * 2
    expert = LayerShape(shape["num_experts"], shape["num_experts_per_tok"], row)
    experts = layers * expert.num_experts * row
    return ModelFacts(
        "shape",
        (expert,) * layers,
        other,
        experts,
        4 * keys * layers,
        layers,
        False,
        num_heads=shape["num_attention_heads"],
        kv_parts=shape["num_key_value_heads"],
        expert_width=shape["moe_intermediate_size"],
    )


if __name__ == "__main__":
    main()
