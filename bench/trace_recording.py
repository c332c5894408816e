"""What recording the routing costs: eager decode of the OLMoE-1B-7B shape with and without it.

    python bench/trace_recording.py --traces DIR --out bench/results/trace-recording.json

Device-managed cache, batch 1, `generate` without CUDA graphs (hooks do not run in replays), the
same ids in every step, so that every expert hits and nothing hides what the hooks cost. DIR holds
the trace; docs/traces.md has its form.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch

import cases
import machine
import olmoe

NUM_TOKENS = 48
REPEAT = 5


def main() -> None:
    args = cases.parser(__doc__).parse_args()
    import hotexperts.transformers as hot
    from hotexperts.integrations.transformers.recording import RoutingRecorder

    model = olmoe.build("cuda")
    hot.attach(model, expert_cache_size=16, cache_mode="device", device="cuda")
    olmoe.Replay(args.traces / olmoe.TRACE, model, "cuda").show(0, olmoe.PREFILL_TOKENS, 1)
    recorder = RoutingRecorder(model)
    ways: dict[str, Any] = {"without": nullcontext(), "with": recorder}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(1 + REPEAT):
        for name, way in ways.items():
            with way:
                seconds = decode(model)
                recorder.take()
            if repeat:
                taken[name].append(1e3 * seconds / NUM_TOKENS)
    rows = {name: {"step_ms": machine.spread(values)} for name, values in taken.items()}
    base, recorded = (rows[name]["step_ms"]["median"] for name in ways)
    slower = recorded / base - 1
    print(rows, f"{slower:+.2%}")
    if args.out:
        about = {"shape": olmoe.SHAPE, "num_tokens": NUM_TOKENS, "slower": slower}
        machine.write(args.out, "trace-recording", {**about, "ways": rows})


@torch.no_grad()
def decode(model: Any) -> float:
    """Seconds of a greedy continuation of one token."""
    token = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(
        token, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
    )
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
