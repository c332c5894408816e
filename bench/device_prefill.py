"""Prefill of the OLMoE-1B-7B shape through a device-managed cache, all experts in use.

    python bench/device_prefill.py --traces DIR --out bench/results/device-prefill.json

Random weights; each token asks for 8 of 64 experts at random, so that every layer needs them all.
"resident" is the same model with every expert on the GPU, "all" the cache with 64 slots, "quarter"
with 16 slots, which are full: 48 experts a layer stream through the banks, as they are or packed.
Then a recorded sequence (replay R2) is decoded with such a prefill of 2048 tokens in its middle and
without it: what its next 64 steps miss shows whether the prefill took anything away. DIR holds the
trace; docs/traces.md has its form.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import cases
import machine
import olmoe

CASES = ("resident", "all", "quarter-adv", "quarter-adv-packed12")
NUM_TOKENS = (512, 2048, 8192)
REPEAT = 5


def main() -> None:
    about = {"shape": olmoe.SHAPE}
    benchmark = cases.Benchmark("device-prefill", CASES, measure, about, compare)
    cases.run(benchmark, cases.parser(__doc__).parse_args())


def compare(table: cases.Table) -> dict[str, Any]:
    resident = table.get("resident")
    for row in table.values():
        for name, found in row["prefill"].items():
            found["gb_s"] = found["missed_bytes"] / found["ms"]["median"] / 1e6
            found["part_of_link"] = found["gb_s"] / row["link_gb_s"]
            if resident is not None:
                base = resident["prefill"][name]["ms"]["median"]
                found["ms_over_resident"] = found["ms"]["median"] - base
    return {}


def measure(case: str, args: argparse.Namespace) -> dict[str, Any]:
    model = olmoe.build("cuda")
    size, policy, packing = (case.split("-") + ["lru", "none"][case.count("-") :])[:3]
    if size == "resident":
        model.to("cuda").set_experts_implementation("grouped_mm")
    else:
        import hotexperts.transformers as hot

        capacity = olmoe.SHAPE["num_experts"] // (1 if size == "all" else 4)
        options = {"policy": policy, "expert_packing": packing, "cache_mode": "device"}
        hot.attach(model, expert_cache_size=capacity, device="cuda", **options)
    replay = olmoe.Replay(args.traces / olmoe.TRACE, model, "cuda", max(NUM_TOKENS))
    row: dict[str, Any] = {"link_gb_s": machine.link_gb_s()}
    row["prefill"] = {str(n): prefill(model, replay, n) for n in NUM_TOKENS}
    row["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
    if size == "quarter":
        row["capacity"] = model.expert_cache.capacity
        row["bank_bytes"] = model.expert_cache.bank_nbytes
        row["interleaved"] = interleaved(model, replay)
    return row


@torch.no_grad()
def prefill(model: Any, replay: olmoe.Replay, num_tokens: int) -> dict[str, Any]:
    cache = getattr(model, "expert_cache", None)
    tokens = torch.arange(num_tokens, device="cuda").unsqueeze(0)
    taken = []
    for i in range(2 + REPEAT):
        replay.show_random(num_tokens, seed=i)
        if i == 2 and cache is not None:
            cache.reset_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(tokens, use_cache=False, logits_to_keep=1)
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - start))
    missed = 0 if cache is None else cache.stats.bytes_moved // REPEAT
    return {"ms": machine.spread(taken[2:]), "missed_bytes": missed}


@torch.no_grad()
def interleaved(model: Any, replay: olmoe.Replay, num_sequences: int = 2) -> dict[str, Any]:
    """Experts missed in 64 steps after a prefill of another sequence, and without one."""
    missed = {"with": 0, "without": 0}
    token = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    prompt = torch.zeros(1, 2048, dtype=torch.int64, device="cuda")
    for how in missed:
        for sequence in range(num_sequences):
            model.expert_cache.reset()
            for step in range(128):
                if step == 64:
                    if how == "with":
                        replay.show_random(2048, seed=sequence)
                        model(prompt, use_cache=False, logits_to_keep=1)
                    model.expert_cache.reset_stats()
                replay.show(sequence, olmoe.PREFILL_TOKENS + step, 1)
                model(token, use_cache=False)
            missed[how] += model.expert_cache.stats.misses
    return {"misses": missed, "more": missed["with"] / missed["without"] - 1}


if __name__ == "__main__":
    main()
