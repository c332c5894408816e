"""Forecasts of `hotexperts plan` beside what benchmarks measured.

    python tools/check_plan.py

Of every row in `bench/results/vllm-decode.json` that misses experts: the forecast for that machine,
shape, batch and number of slots, and how far the measured time is outside of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hotexperts.plan.forecast import step
from hotexperts.plan.machine import by_name
from hotexperts.plan.model import ModelFacts
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
    for row in compare():
        worst, best = row.forecast_ms
        print(
            f"{row.name:24} {best:7.2f} to {worst:7.2f} ms  measured {row.measured_ms:7.2f} ms  "
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
        if not batch:
            continue
        kv = KV_TOKENS * int(batch) * facts.kv_nbytes_per_token
        found = step(facts, machine, int(slots), int(batch), kv).ms
        worst, best, measured = *found, run["ms"]
        outside = measured / worst - 1 if measured > worst else min(0.0, measured / best - 1)
        yield Compared(name, found, measured, outside)


def qwen3(shape: dict[str, int]) -> ModelFacts:
    """What `read_facts` would find in a checkpoint of this shape, bf16."""
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * heads, shape["num_key_value_heads"] * heads
    attention = hidden * (2 * queries + 2 * keys) + hidden * shape["num_experts"]
    other = 2 * (layers * attention + 2 * shape["vocab_size"] * hidden)
    row = 3 * hidden * shape["moe_intermediate_size"] * 2
    expert = LayerShape(shape["num_experts"], shape["num_experts_per_tok"], row)
    experts = layers * expert.num_experts * row
    return ModelFacts("shape", (expert,) * layers, other, experts, 4 * keys * layers, layers, False)


if __name__ == "__main__":
    main()
