"""Forecasts of `hotexperts plan` beside what benchmarks measured.

    python tools/check_plan.py

Of every row in `bench/results/` that a forecast is made for: decode, prefill and slots of caches in
vLLM (`vllm-decode*.json`, `vllm-promise.json`), prefill and decode in Transformers, in its own loop
and in one CUDA graph (`core-decode.json`, `device-decode.json`, `device-prefill.json`), hit rates
of recorded routing (`policies.json`), decode of two GPUs (`two-gpu.json`, where it is there), and
of a shape in `hotexperts bench` (`bench-gpt-oss-20b.json`). A
forecast is a range: how far what was measured is outside of it; where routing was drawn as the
forecast's is, also how far from the better end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from hotexperts.plan.forecast import forecast
from hotexperts.plan.machine import Machine, by_name
from hotexperts.plan.model import ModelFacts
from hotexperts.plan.speed import (
    GRAPH_LAYER_MS,
    LOOP_LAYER_MS,
    ONE_GPU,
    PACKED_PART,
    most_misses,
    prefill_ms,
    step,
)
from hotexperts.plan.split import Parallel, Split, demand, part_of
from hotexperts.sizing import LayerShape

KV_TOKENS = 200  # a prompt of 64 and what is decoded after it, on average
PROMPT_TOKENS = 2000  # of a prefill in vLLM
TRANSFORMERS_GRAPH_LAYER_MS = 0.2  # of many small kernels: not forecast, as `run` captures none
RECORDED_TOP_K = {"Qwen3-30B-A3B": 6, "gpt-oss-120b": 4, "granite-3.0-1b-a400m": 8, "moe507m": 8}
OUTLIERS = {  # more than 25 % outside, and what is known of it
    "device-decode: host-6GiB-lru": "not the default policy; its steps took from 28 to 468 ms",
}
RESULTS = Path(__file__).parent.parent / "bench/results"


class Compared(NamedTuple):
    """A forecast and what was measured.

    Attributes:
        name: of the result and the row.
        forecast: worst and best, or both the same.
        measured: the same quantity.
        unit: of both.
        is_drawn: measured with routing that was drawn as the forecast's is.
    """

    name: str
    forecast: tuple[float, float]
    measured: float
    unit: str = "ms"
    is_drawn: bool = False

    @property
    def outside(self) -> float:
        """0 within the range, else in parts of its nearer end."""
        low, high = sorted(self.forecast)
        return min(0.0, self.measured / low - 1) or max(0.0, self.measured / high - 1)

    @property
    def error(self) -> float | None:
        """From the better end, in parts of 1; None where routing differs."""
        return self.measured / self.forecast[1] - 1 if self.is_drawn else None


def main() -> None:
    for row in compare():
        low, high = sorted(row.forecast)
        error = "" if row.error is None else f"  from the better end {row.error:+.0%}"
        why = f"  ({OUTLIERS[row.name]})" if row.name in OUTLIERS else ""
        print(
            f"{row.name:44} {low:8.2f} to {high:8.2f}  measured {row.measured:8.2f} {row.unit:6}  "
            f"outside {row.outside:+.0%}{error}{why}"
        )


def compare() -> Iterator[Compared]:
    """One row a measurement."""
    yield from _vllm_decode("vllm-decode", PACKED_PART)
    yield from _vllm_decode("vllm-decode-plain", 1.0)
    yield from _vllm_packed()
    yield from _vllm_promise()
    yield from _transformers()
    yield from _hit_rates()
    yield from _shape_bench("bench-gpt-oss-20b")
    if (RESULTS / "two-gpu.json").exists():
        yield from compare_ranks(_load("two-gpu"))


def _vllm_decode(result: str, packed_part: float) -> Iterator[Compared]:
    results = _load(result)
    facts, found = qwen3(results["shape"]), results["cases"]["cache"]
    machine = _h200(found)
    for name, run in found["runs"].items():
        slots, _, what = name.partition(" slots, ")
        if not what:
            continue
        if what == "prefill":
            where = facts, machine, int(slots), PROMPT_TOKENS
            ms = prefill_ms(*where, packed_part=packed_part)
        else:
            batch = int(what.removeprefix("batch "))
            ms = _step_ms(facts, machine, int(slots), batch, packed_part=packed_part)
        yield Compared(f"{result}: {name}", ms, run["ms"], is_drawn=what != "prefill")


def _vllm_packed() -> Iterator[Compared]:
    results = _load("prefetch-decode")
    facts, found = qwen3(results["shape"]), results["cases"]["packed12"]
    for name, run in found["runs"].items():
        slots, _, how = name.partition(" slots, ")
        if how == "off":
            ms = _step_ms(facts, by_name("H200"), int(slots), 1, packed_part=PACKED_PART)
            yield Compared(f"prefetch-decode: {name}", ms, run["ms"], is_drawn=True)


def _vllm_promise() -> Iterator[Compared]:
    results = _load("vllm-promise")
    facts, found = qwen3(results["shape"]), results["cases"]["whole"]
    machine, chunk = _h200(found), results["chunk_tokens"]
    context = results["kv_bytes"] // facts.kv_nbytes_per_token // 8
    num_chunks = -(-PROMPT_TOKENS // chunk)
    for name, ceiling in found["ceilings"].items():
        budget = int(name.removesuffix(" GiB")) << 30
        plan = forecast(
            facts,
            machine,
            budget_nbytes=budget,
            ram_nbytes=None,
            context=context,
            batch=8,
            prefill_tokens=(chunk,),
        )
        slots, label = plan.capacity, f"vllm-promise: {name}"
        yield Compared(f"{label}, slots", (slots, slots), ceiling["slots"], "slots", is_drawn=True)
        for batch in (1, 8):
            ms = _step_ms(facts, machine, slots, batch, packed_part=PACKED_PART)
            measured = found["runs"][f"{name}, batch {batch}"]["ms"]
            yield Compared(f"{label}, batch {batch}", ms, measured, is_drawn=True)
        worst, best = prefill_ms(facts, machine, slots, chunk, packed_part=PACKED_PART)
        measured = found["runs"][f"{name}, prefill"]["ms"]
        yield Compared(f"{label}, prefill", (num_chunks * worst, num_chunks * best), measured)


def _transformers() -> Iterator[Compared]:
    for result, layer_ms in (
        ("core-decode", LOOP_LAYER_MS),
        ("device-decode", TRANSFORMERS_GRAPH_LAYER_MS),
    ):
        results = _load(result)
        facts = olmoe(results["shape"])
        for name, row in results["cases"].items():
            if "capacity" not in row:
                continue
            is_loop = "step_ms_mean" not in row
            speed = row["tokens_per_s"]["median"] if is_loop else row["tokens_per_s"]
            layer = LOOP_LAYER_MS if is_loop else layer_ms
            packed = PACKED_PART if row.get("packing") == "packed12" else 1.0
            where = facts, by_name("H200"), row["capacity"], 1, layer
            ms = _step_ms(*where, packed_part=packed)
            yield Compared(f"{result}: {name}", ms, 1e3 / speed)
    results = _load("device-prefill")
    row = results["cases"]["quarter-adv"]
    for num_tokens, found in row["prefill"].items():
        ms = prefill_ms(olmoe(results["shape"]), _h200(row), row["capacity"], int(num_tokens))
        yield Compared(f"device-prefill: {num_tokens} tokens", ms, found["ms"]["median"])


def _shape_bench(result: str) -> Iterator[Compared]:
    """What `hotexperts bench --shape` printed; its steps are not scheduled ahead."""
    results = _load(result)
    shape = results["shape"]
    facts = _facts(shape, shape["intermediate_size"], shape["head_dim"], results["expert_nbytes"])
    for row in results["rows"]:
        if row["capacity"] is not None:
            ms = _step_ms(facts, _h200(row), row["capacity"], row["batch"])
            name = f"{result}: {row['capacity']} slots, batch {row['batch']}"
            yield Compared(name, ms, row["warm"]["step_ms"])


def _hit_rates() -> Iterator[Compared]:
    """Of the default policy, over recordings."""
    for trace, columns in _load("policies")["hit_rates"].items():
        for name, rates in columns.items() if trace in RECORDED_TOP_K else ():
            batch, of = name.removeprefix("batch ").split(", ")
            slots, experts = map(int, of.split(" of "))
            asked = demand(experts, RECORDED_TOP_K[trace], slots, int(batch))
            most = min(asked.demanded, asked.missed * most_misses(experts, slots, int(batch)))
            missed = (most, asked.missed)
            hits = tuple(100 * (1 - count / asked.demanded) for count in missed)
            yield Compared(
                f"policies: {trace}, {name}", (hits[0], hits[1]), 100 * rates["adv"], "% hits"
            )


def compare_ranks(results: dict[str, Any]) -> Iterator[Compared]:
    """The same of `bench/two_gpu.py`; what ranks tell each other is in the measured time alone."""
    facts = qwen3(results["shape"])
    machine = by_name("H200")._replace(link_gb_s=results["link_gb_s"]["together"])
    for way in get_args(Parallel):
        for name, run in results["cases"].get(way, {}).get("runs", {}).items():
            if "ms" in run:
                batch = int(name.rsplit(" ", 1)[-1])
                split = Split(2, way)
                ms = _step_ms(
                    facts, machine, run["slots"], batch, split=split, packed_part=PACKED_PART
                )
                yield Compared(f"two-gpu: {way}, {name}", ms, run["ms"])


def _step_ms(
    facts: ModelFacts,
    machine: Machine,
    slots: int,
    batch: int,
    layer_ms: float = GRAPH_LAYER_MS,
    split: Split = ONE_GPU,
    packed_part: float = 1.0,
) -> tuple[float, float]:
    kv = KV_TOKENS * batch * part_of(facts, split).kv_nbytes_per_token
    return step(facts, machine, slots, batch, kv, split, layer_ms, packed_part).ms


def _h200(row: dict[str, Any]) -> Machine:
    return by_name("H200")._replace(link_gb_s=row["link_gb_s"])


def _load(result: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{result}.json").read_text())
    return found


def qwen3(shape: dict[str, int]) -> ModelFacts:
    """What `read_facts` would find in a checkpoint of this shape, bf16."""
    return _facts(shape, shape["moe_intermediate_size"], shape["head_dim"])


def olmoe(shape: dict[str, int]) -> ModelFacts:
    """The same for the other shape."""
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    return _facts(shape, shape["intermediate_size"], head_dim)


def _facts(
    shape: dict[str, int], width: int, head_dim: int, expert_nbytes: int | None = None
) -> ModelFacts:
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    queries, keys = (shape[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    attention = hidden * (2 * queries + 2 * keys) + hidden * shape["num_experts"]
    row = expert_nbytes or 3 * hidden * width * 2
    expert = LayerShape(shape["num_experts"], shape["num_experts_per_tok"], row)
    return ModelFacts(
        name="shape",
        layers=(expert,) * layers,
        other_nbytes=2 * (layers * attention + 2 * shape["vocab_size"] * hidden),
        expert_nbytes=layers * expert.num_experts * row,
        kv_nbytes_per_token=4 * keys * layers,
        num_layers=layers,
        hidden_size=hidden,
        expert_width=width,
        vocab_size=shape["vocab_size"],
        num_heads=shape["num_attention_heads"],
        kv_parts=shape["num_key_value_heads"],
    )


if __name__ == "__main__":
    main()
