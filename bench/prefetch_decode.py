"""What prefetching gains in vLLM at batch 1: guesses of known quality, on the replayed routing R1.

    python bench/prefetch_decode.py --traces DIR --out bench/results/prefetch-decode.json

24 of Qwen3-30B-A3B's 48 layers, random weights, FULL CUDA graphs (bench/vllm_decode.py). Guesses
are made from the true ids: "perfect" are those, in random order; "router" keeps each with
probability .83, as a trained model's next router does, and draws the others from the layer's
popularity outside of the demand; "wrong" draws all of them so. All pay for the next layer's router
on the experts' input. "off" is an engine without prefetch.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cases
import machine
import vllm_decode
import vllm_engine
from hotexperts.bench.replay import scored
from vllm_engine import Engine

CASES = ("plain", "packed12")
KEPT = {"perfect": 1.0, "router": 0.83, "wrong": 0.0}
SLOTS = (32, 64, 128)
STEPS = 30, 120  # warm, then timed
NUM_SETTLED = (
    40  # of them, at the end, when guesses that are all wrong have switched themselves off
)
GRAPHS = {"cudagraph_capture_sizes": [1], "cudagraph_mode": "FULL_DECODE_ONLY"}


def main() -> None:
    about = {"shape": vllm_decode.SHAPE, "replay": "R1", "kept": KEPT, "graphs": GRAPHS}
    benchmark = cases.Benchmark("prefetch-decode", CASES, measure, about, compare, show)
    parser = cases.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a case, at most")
    cases.run(benchmark, parser.parse_args())


def show(row: cases.Row) -> str:
    return "".join(f"\n  {name:20} {found}" for name, found in row["runs"].items())


def compare(table: cases.Table) -> dict[str, Any]:
    """Adds what is gained over "off", in ms and in parts of what perfect guesses gain."""
    for row in table.values():
        for slots in SLOTS:
            runs = {how: row["runs"].get(f"{slots} slots, {how}") for how in ("off", *KEPT)}
            off = runs.pop("off")
            for found in runs.values():
                if off is not None and found is not None:
                    found["gain_ms"] = off["ms"] - found["ms"]
                    found["of_off"] = found["ms"] / off["ms"]
                    found["settled_of_off"] = found["settled_ms"] / off["settled_ms"]
            best = (runs["perfect"] or {}).get("gain_ms", 0.0)
            if best > 0 and runs["router"] is not None:
                runs["router"]["of_perfect"] = runs["router"]["gain_ms"] / best
    return {}


def measure(case: str, args: Any) -> cases.Row:
    until = time.monotonic() + args.seconds
    packing = "none" if case == "plain" else case
    options = {"moe_expert_cache_size": 32, "compilation_config": GRAPHS}
    options["moe_expert_cache_options"] = {"packing": packing, "prefetch": "router"}
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder), vllm_decode.SHAPE, **vllm_decode.ENGINE, **options)
    ids = vllm_decode.routing(args.traces, vllm_decode.SHAPE["num_hidden_layers"])[:, :, :1]
    replay = Guesses(engine, ids)
    row: cases.Row = {"link_gb_s": machine.link_gb_s(), "runs": {}}
    for slots in SLOTS:
        for how in ("off", *KEPT):
            if time.monotonic() > until:
                return row
            replay.follow(None if how == "off" else KEPT[how])
            engine.use_slots(slots)
            replay.step = 0
            taken = engine.timed_decode(1, *STEPS)
            found = {"ms": statistics.fmean(taken), "step_ms": machine.spread(taken)}
            found["settled_ms"] = statistics.fmean(taken[-NUM_SETTLED:])
            found |= vllm_decode.per_step(engine.counts, STEPS[1]) | replay.counted()
            row["runs"][f"{slots} slots, {how}"] = found
            print(slots, how, found["ms"], file=sys.stderr, flush=True)
    return row


class Guesses(vllm_engine.Replay):
    """A replay whose layers guess what the next one will ask for, well or badly."""

    def __init__(self, engine: Engine, ids: torch.Tensor) -> None:
        super().__init__(engine, ids)
        self._engine = engine
        self._cache = engine.caches.options.cache
        _, num_layers, _, _ = ids.shape
        self._num_experts = engine.config.model_config.get_num_experts()
        self._scores = torch.zeros(num_layers, 1, self._num_experts, device=self.shown.device)
        self._all: torch.Tensor | None = None
        layers = list(engine.caches.layers.values())
        self._routers = [layer.guess for layer in layers[:-1]]

    def follow(self, kept: float | None) -> None:
        """Guesses so good, before the graphs are captured; None: no prefetch."""
        caches = self._engine.caches
        prefetch = "off" if kept is None else "router"
        caches.options = replace(caches.options, cache=replace(self._cache, prefetch=prefetch))
        for index, (layer, router) in enumerate(
            zip(list(caches.layers.values())[:-1], self._routers, strict=True)
        ):
            scores, gate = self._scores[index + 1], router._weights
            layer.guess = None if kept is None else partial(scored, scores, gate)
        if kept is not None:
            self._all = guessed(self._ids[:, :, 0].cpu().numpy(), kept, self._num_experts)
            self._all = self._all.to(self.shown.device)

    def show(self, num_tokens: int) -> None:
        """As before, and the guesses of the same step."""
        if self._all is not None and num_tokens == 1:
            self._scores[:, 0].copy_(self._all[self.step % len(self._all)])
        super().show(num_tokens)

    def counted(self) -> dict[str, Any]:
        """Rows that came ahead since the last reset, and those of them that were asked for."""
        from hotexperts.kernels.plan import Counter

        providers = [layer.provider for layer in self._engine.caches.layers.values()]
        counts = sum(p.kernel.counters[Counter.AHEAD :].cpu() for p in providers).tolist()
        return {"rows_issued": counts[0], "rows_used": counts[2]}


def guessed(ids: Any, kept: float, num_experts: int, seed: int = 0) -> torch.Tensor:
    """Scores `[steps, layers, E]` from the true ids `[steps, layers, K]`."""
    rng = np.random.default_rng(seed)
    num_steps, num_layers, top_k = ids.shape
    scores = np.full((num_steps, num_layers, num_experts), -np.inf, np.float32)
    for layer in range(num_layers):
        popularity = np.bincount(ids[:, layer].ravel(), minlength=num_experts) + 1e-6
        for step in range(num_steps):
            true = ids[step, layer]
            is_kept = rng.random(top_k) < kept
            others = popularity.copy()
            others[true] = 0
            drawn = rng.choice(num_experts, top_k, replace=False, p=others / others.sum())
            found = rng.permutation(np.where(is_kept, true, drawn))
            scores[step, layer, found] = -np.arange(top_k)
    return torch.from_numpy(scores)


if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    main()
