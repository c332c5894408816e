"""Decode of the OLMoE-1B-7B shape with the cache managed on the device, inside a CUDA graph.

    python bench/device_decode.py --traces DIR --out bench/results/device-decode.json

DIR holds the trace; docs/traces.md has its form. Each case runs in a process of its own: random
weights, routing replayed (R2), batch 1, a prefill of 128 tokens, then decode steps with a static KV
cache: one graph replay a step, timed one by one. "resident" is the same engine with every expert on
the GPU; "auto" is `device_map="auto"` and "host" the host-managed cache (as vLLM PR 37190 proposes:
LRU in Python, a synchronisation a layer), both with Transformers' eager loop, which they need.
"prefetch" follows the trace's guesses, of a trained model's next router on the experts' input;
"perfect" knows what the next layer will ask for.
Serial floor = resident step + missed bytes / (0.94 x link); percent of bound = max(resident step,
missed bytes / link) / step.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cases
import core_decode
import machine
import olmoe
from hotexperts.bench.bound import bound
from hotexperts.bench.decode import Decoder

CASES = (
    "resident",
    "auto-6GiB",
    "host-6GiB-lru",
    "device-6GiB-lru",
    "device-6GiB-adv",
    "device-6GiB-adv-packed12",
    "device-6GiB-adv-packed12-prefetch",
    "device-6GiB-adv-packed12-perfect",
    "device-all",
)
MAX_POSITIONS = 384


def main() -> None:
    parser = cases.parser(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=4)
    about = {"shape": olmoe.SHAPE, "replay": "R2"}
    benchmark = cases.Benchmark("device-decode", CASES, measure, about, add_bounds)
    cases.run(benchmark, parser.parse_args())


def add_bounds(table: cases.Table) -> dict[str, Any]:
    if "resident" not in table:
        return {}
    base = table["resident"]["step_ms"]["median"]
    for row in table.values():
        if "step_ms" not in row:  # of the eager loop, whose steps are not comparable
            continue
        step, missed = row["step_ms_mean"], row.get("bytes_per_step", 0)
        row |= bound(step, base, missed, row["link_gb_s"])._asdict()
        row["percent_of_serial_floor"] = 100 * row["serial_floor_ms"] / step
    return {}


def measure(case: str, args: argparse.Namespace) -> dict[str, Any]:
    kind, _, rest = case.partition("-")
    if kind in ("auto", "host"):
        name = case.replace("host-", "cache-")
        return core_decode.measure(
            name, argparse.Namespace(traces=args.traces, steps=96, sequences=2)
        )
    model = olmoe.build("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if kind == "resident":
        model.to("cuda").set_experts_implementation("batched_mm")
    else:
        import hotexperts.transformers as hot

        usual = ["lru", "none", "off"]
        size, policy, packing, prefetch = (rest.split("-") + usual[rest.count("-") :])[:4]
        hot.attach(
            model,
            expert_cache_size=64 if size == "all" else size,
            policy=policy,
            expert_packing=packing,
            prefetch="off" if prefetch == "off" else "router",
            cache_mode="device",
            kv_tokens=MAX_POSITIONS,
            device="cuda",
        )
    run = Decode(model, args.traces / olmoe.TRACE)
    if case.endswith(("prefetch", "perfect")):
        run.guess(is_perfect=case.endswith("perfect"))
    for sequence in range(args.sequences):
        run.sequence(sequence, args.steps)
    row = {
        "tokens_per_s": 1e3 / (sum(run.step_ms) / len(run.step_ms)),
        "step_ms": machine.spread(run.step_ms),
        "step_ms_mean": sum(run.step_ms) / len(run.step_ms),
        "prefill_ms": machine.spread(run.prefill_ms),
        "num_steps": len(run.step_ms),
        "link_gb_s": machine.link_gb_s(),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(),
        "last_tokens": run.last_tokens,
    }
    if kind == "resident":
        return row
    cache = model.expert_cache
    return row | {
        "capacity": cache.capacity,
        "staging": 0,
        "bank_bytes": cache.bank_nbytes,
        "policy": cache.policy,
        "packing": cache.packing,
        **ahead(cache),
        "host_bytes": cache.host_nbytes,
        "hit_rate": run.hits / (run.hits + run.misses),
        "bytes_per_step": run.bytes_moved / len(run.step_ms),
    }


def ahead(cache: Any) -> dict[str, int]:
    """Rows that came ahead, and those of them that were asked for, since the last reset."""
    from hotexperts.kernels.plan import Counter

    counts = sum(p.kernel.counters[Counter.AHEAD :].cpu() for p in cache.providers).tolist()
    return {"rows_issued": counts[0], "rows_used": counts[2]} if counts[0] else {}


class Decode:
    """Prefills eagerly, then replays one captured decode step; sums what several sequences took."""

    def __init__(self, model: Any, trace: Path) -> None:
        self._model = model
        self._decoder = Decoder(model, max_positions=MAX_POSITIONS, uses_graph=True)
        self._replay = olmoe.Replay(trace, model, "cuda")
        self.prefill_ms: list[float] = []
        self.step_ms: list[float] = []
        self.last_tokens: list[int] = []
        self.hits = self.misses = self.bytes_moved = 0

    def guess(self, *, is_perfect: bool) -> None:
        """Prefetch what was recorded as guesses, or what will be asked for."""
        self._replay.guess(self._model, is_perfect=is_perfect)

    def sequence(self, index: int, num_steps: int) -> None:
        """A prefill of 128 tokens and `num_steps` replays."""
        prompt = torch.arange(olmoe.PREFILL_TOKENS, device="cuda").unsqueeze(0)
        taken = self._decoder.sequence(prompt, partial(self._replay.show, index), num_steps)
        self.prefill_ms.append(taken.prefill_ms)
        self.step_ms += taken.step_ms
        self.last_tokens += taken.last_tokens
        self.hits += taken.decode.hits
        self.misses += taken.decode.misses
        self.bytes_moved += taken.decode.bytes_moved


if __name__ == "__main__":
    main()
