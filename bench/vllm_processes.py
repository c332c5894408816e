"""Are two processes of vLLM equal, bit for bit? Stock against stock, and the cache against stock.

    python bench/vllm_processes.py --out bench/results/vllm-processes.json

4 layers of the Qwen3-30B-A3B shape, random weights, vLLM's own compilation and CUDA graphs,
sampling at temperature 1 with a seed a sequence. Each of these is a process of its own: "stock" and
"stock-again" are the same command; "stock-small-kv" has an eighth of the KV cache;
"stock-compiled-anew" reads no cache of compiled graphs; "all" has a slot for each of the 128
experts, "quarter" 32, and "quarter-not-reset" leaves in the slots what warm-up and capture brought.
A process also answers the same prompts twice ("repeats").
"""

from __future__ import annotations

import argparse
import base64
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import cases
import vllm_engine

STOCK = "stock"
SLOTS = {"all": 128, "quarter": 32, "quarter-not-reset": 32}
CASES = (STOCK, "stock-again", "stock-small-kv", "stock-compiled-anew", *SLOTS)
SHAPE = {**vllm_engine.QWEN3_30B, "num_hidden_layers": 4}
KV_NBYTES = 2 << 30
BATCHES = (1, 4, 8)
NUM_TOKENS = 32
Sequences = list[tuple[list[int], list[float]]]


def main() -> None:
    about = {"shape": SHAPE, "batches": BATCHES, "tokens_a_sequence": NUM_TOKENS}
    benchmark = cases.Benchmark("vllm-processes", CASES, measure, about, compare, show)
    cases.run(benchmark, cases.parser(__doc__, needs_traces=False).parse_args())


def show(row: cases.Row) -> str:
    return f"repeats {row['repeats']}, against {STOCK}: {row['against_stock']}"


def measure(case: str, args: argparse.Namespace) -> cases.Row:
    if case == "stock-compiled-anew":
        os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
    if case == "quarter-not-reset":
        _never_reset()
    with tempfile.TemporaryDirectory() as folder:
        engine = vllm_engine.Engine(Path(folder), SHAPE, **options(case))
    first, again = answers(engine), answers(engine)
    return {"repeats": first == again, "answers": {b: _written(s) for b, s in first.items()}}


def options(case: str) -> dict[str, Any]:
    """Of `LLM`."""
    kv_nbytes = KV_NBYTES // 8 if case == "stock-small-kv" else KV_NBYTES
    found: dict[str, Any] = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": kv_nbytes}
    found["compilation_config"] = {"cudagraph_capture_sizes": list(BATCHES)}
    if case in SLOTS:
        found["moe_expert_cache_size"] = SLOTS[case]
    return found


def answers(engine: vllm_engine.Engine) -> dict[str, Sequences]:
    """By batch: the tokens of each sequence and their log probabilities."""
    prompts = [[(11 * row + 5 * i) % 5000 + 5 for i in range(24)] for row in range(max(BATCHES))]
    return {f"batch {batch}": engine.generate(prompts[:batch], NUM_TOKENS) for batch in BATCHES}


def compare(table: cases.Table) -> dict[str, Any]:
    """Adds how each differs from stock."""
    stock = table.get(STOCK)
    for row in table.values():
        row["against_stock"] = stock and {
            batch: _difference(stock["answers"][batch], found)
            for batch, found in row["answers"].items()
        }
    return {}


def _difference(wanted: dict[str, str], found: dict[str, str]) -> dict[str, Any]:
    """Sequences with the same tokens, with the same bits, and how far apart the others are."""
    tokens = [_read(of["tokens"], np.int32) for of in (wanted, found)]
    logprobs = [_read(of["logprobs"], np.float32) for of in (wanted, found)]
    same_tokens = (tokens[0] == tokens[1]).all(axis=1)
    same_bits = same_tokens & (logprobs[0] == logprobs[1]).all(axis=1)
    # After another token the sequences are of different texts: only what is before it compares.
    is_before = np.cumprod(tokens[0] == tokens[1], axis=1).astype(bool)
    apart = np.abs(logprobs[0] - logprobs[1])[is_before]
    return {
        "sequences": len(same_tokens),
        "same_tokens": int(same_tokens.sum()),
        "same_bits": int(same_bits.sum()),
        "most_apart": float(apart.max(initial=0.0)),
    }


def _written(sequences: Sequences) -> dict[str, str]:
    return {
        "tokens": _encoded(np.array([tokens for tokens, _ in sequences], np.int32)),
        "logprobs": _encoded(np.array([values for _, values in sequences], np.float32)),
    }


def _encoded(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _read(text: str, dtype: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), dtype).reshape(-1, NUM_TOKENS)


def _never_reset() -> None:
    from hotexperts.integrations.vllm.caches import ModelCaches

    ModelCaches.reset = lambda self: None  # type: ignore[method-assign]


if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    main()
