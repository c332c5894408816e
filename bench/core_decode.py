"""Host-managed decode of the OLMoE-1B-7B shape at a GPU budget, against `device_map="auto"`.

    python bench/core_decode.py --traces DIR --out bench/results/core-decode.json

DIR holds the trace; docs/traces.md has its form. Each case runs in a process of its own: random
weights, routing replayed (R2), batch 1, a prefill of 128 tokens and then decode steps timed one by
one. A budget is what `torch.cuda` may allocate at most over load and run: weights, slots, banks and
KV cache together; the peak is reported.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from typing import Any

import torch

import cases
import machine
import olmoe

CASES = ("resident", "auto-4GiB", "cache-4GiB", "auto-6GiB", "cache-6GiB")
NUM_WARM_STEPS = 2


def main() -> None:
    parser = cases.parser(__doc__)
    parser.add_argument("--steps", type=int, default=96, help="decode steps of a sequence")
    parser.add_argument("--sequences", type=int, default=3)
    about = {"shape": olmoe.SHAPE, "replay": "R2"}
    benchmark = cases.Benchmark("core-decode", CASES, measure, about, ratios, show)
    cases.run(benchmark, parser.parse_args())


def show(row: cases.Row) -> str:
    return f"{row['tokens_per_s']['median']:7.2f} tok/s {row}"


def ratios(table: cases.Table) -> dict[str, Any]:
    speed = {case: row["tokens_per_s"]["median"] for case, row in table.items()}
    pairs = {f"cache over auto, {b}": (f"cache-{b}", f"auto-{b}") for b in ("4GiB", "6GiB")}
    return {
        "ratios": {
            name: speed[ours] / speed[theirs]
            for name, (ours, theirs) in pairs.items()
            if ours in speed and theirs in speed
        }
    }


def measure(case: str, args: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    model = olmoe.build("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    built = time.perf_counter()
    kind, _, rest = case.partition("-")
    budget, _, policy = rest.partition("-")
    steps, sequences = args.steps, args.sequences
    if kind == "auto":
        model = dispatch(model, budget)
        steps, sequences = min(steps, 6), 1  # each takes seconds
    elif kind == "cache":
        import hotexperts.transformers as hot

        options = {"policy": policy} if policy else {}
        options |= {"cache_mode": "host", "device": "cuda"}
        hot.attach(model, expert_cache_size=budget, kv_tokens=512, **options)
    else:
        model.to("cuda")
    loaded = time.perf_counter()
    replay = olmoe.Replay(args.traces / olmoe.TRACE, model, "cuda")
    run = Run()
    for sequence in range(sequences):
        run.sequence(model, replay, sequence, steps)
    row = {
        "tokens_per_s": machine.spread([1 / s for s in run.step_s]),
        "prefill_seconds": machine.spread(run.prefill_s),
        "num_steps": len(run.step_s),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(),
        "build_seconds": built - start,
        "load_seconds": loaded - built,
    }
    return row if kind != "cache" else row | cache_figures(model.expert_cache, run)


def cache_figures(cache: Any, run: Run) -> dict[str, Any]:
    return {
        "capacity": cache.capacity,
        "policy": cache.policy,
        "staging": 0,
        "bank_bytes": cache.bank_nbytes,
        "reason": cache.reason,
        "hit_rate": run.hits / (run.hits + run.misses),
        "bytes_per_step": run.bytes_moved / len(run.step_s),
    }


def dispatch(model: Any, budget: str) -> Any:
    """What `from_pretrained(device_map="auto", max_memory=...)` does with a loaded model."""
    from accelerate import dispatch_model, infer_auto_device_map

    limits = {0: budget, "cpu": "200GiB"}
    blocks = model._no_split_modules
    blocks = list(blocks) if blocks else None
    device_map = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=blocks)
    return dispatch_model(model, device_map)


@dataclass
class Run:
    """Seconds and cache counters of what was measured; the first sequence's start warms up."""

    prefill_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    hits: int = 0
    misses: int = 0
    bytes_moved: int = 0

    @torch.no_grad()
    def sequence(self, model: Any, replay: olmoe.Replay, index: int, num_steps: int) -> None:
        """A prefill and `num_steps` decode steps; the first two steps are not counted."""
        replay.show(index, 0, olmoe.PREFILL_TOKENS)
        tokens = torch.arange(olmoe.PREFILL_TOKENS, device="cuda").unsqueeze(0)
        seconds, out = timed(model, tokens, None)
        self.prefill_s.append(seconds)
        cache = getattr(model, "expert_cache", None)
        for step in range(NUM_WARM_STEPS + num_steps):
            if step == NUM_WARM_STEPS and cache is not None:
                cache.reset_stats()
            replay.show(index, olmoe.PREFILL_TOKENS + step, 1)
            seconds, out = timed(model, out.logits[:, -1:].argmax(-1), out.past_key_values)
            if step >= NUM_WARM_STEPS:
                self.step_s.append(seconds)
        if cache is not None:
            stats = cache.stats
            self.hits += stats.hits
            self.misses += stats.misses
            self.bytes_moved += stats.bytes_moved


def timed(model: Any, tokens: torch.Tensor, past: Any) -> tuple[float, Any]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = model(tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
    torch.cuda.synchronize()
    return time.perf_counter() - start, out


if __name__ == "__main__":
    main()
