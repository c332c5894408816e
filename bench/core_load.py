"""Loading a 2.6 GB OLMoE-shaped checkpoint: seconds and host memory, one process a way.

    python bench/core_load.py --out bench/results/core-load.json

Ways: Transformers alone; the cache with experts left in the file; the cache with experts in RAM.
`peak_anonymous` is the peak of memory that only this process can free (RssAnon), sampled every
2 ms; `over_torch` is that less what importing torch and Transformers takes. `cold` has loads into
RAM with the files not in the page cache, each beside a plain read of the same files, as cold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import machine

WAYS = ("import", "transformers", "file", "ram")
READ_NBYTES = 8 << 20
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 16384,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.checkpoint)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        print(f"checkpoint: {size / 1e9:.2f} GB")
        ways = {way: [child(way, folder) for _ in range(args.repeat)] for way in WAYS}
        cold = cold_loads(folder, args.repeat)
    base = min(run["peak_anonymous"] for run in ways["import"])
    table = {way: summary(runs, base) for way, runs in ways.items() if way != "import"}
    for way, row in table.items():
        print(f"{way:13} {row['seconds']['median']:6.2f} s, {row['over_torch'] / 1e9:.2f} GB")
    print(f"cold: {cold['ratio']['median']:.2f} times a plain read")
    if args.out:
        results = {"checkpoint_bytes": size, "shape": SHAPE, "ways": table, "cold": cold}
        machine.write(args.out, "core-load", results)


def summary(runs: list[dict[str, float]], base: float) -> dict[str, Any]:
    peak = max(run["peak_anonymous"] for run in runs)
    return {
        "seconds": machine.spread([run["seconds"] for run in runs]),
        "peak_anonymous": peak,
        "over_torch": peak - base,
    }


def cold_loads(folder: str, num_runs: int) -> dict[str, Any]:
    read, loaded = [], []
    for _ in range(num_runs):
        read.append(plain_read(Path(folder)))
        forget_files(Path(folder))
        loaded.append(child("ram", folder)["seconds"])
    ratios = [ours / plain for ours, plain in zip(loaded, read, strict=True)]
    spread = machine.spread
    return {"read": spread(read), "ram": spread(loaded), "ratio": spread(ratios)}


def plain_read(folder: Path) -> float:
    """Seconds of reading the files one after another into one buffer, from a cold page cache."""
    forget_files(folder)
    buffer = bytearray(READ_NBYTES)
    start = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def forget_files(folder: Path) -> None:
    """Out of the page cache with them; what is not on the disk yet would stay."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_checkpoint(folder: Path) -> None:
    import torch
    from transformers import OlmoeConfig, OlmoeForCausalLM

    model = OlmoeForCausalLM(OlmoeConfig(**SHAPE)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="500MB")


def child(way: str, folder: str) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", __file__, "--measure", way, "--checkpoint", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().split("\n")[-1])


def measure(way: str, checkpoint: Path) -> dict[str, float]:
    from transformers import AutoModelForCausalLM, OlmoeForCausalLM  # noqa: F401 (import cost)

    import hotexperts.transformers as hot

    with PeakAnonymous() as peak:
        start = time.perf_counter()
        if way == "transformers":
            keep: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
        elif way in ("file", "ram"):
            keep = hot.load(checkpoint, expert_cache_size=8, expert_store=way, device="cpu")
        else:
            keep = None
        seconds = time.perf_counter() - start
    del keep
    return {"seconds": seconds, "peak_anonymous": peak.num_bytes}


class PeakAnonymous:
    """Samples this process's anonymous memory in the background."""

    def __enter__(self) -> PeakAnonymous:
        self.num_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self._look()
        self._look()

    def _look(self) -> None:
        for line in Path("/proc/self/status").read_text().split("\n"):
            if line.startswith("RssAnon"):
                self.num_bytes = max(self.num_bytes, int(line.split()[1]) * 1024)


if __name__ == "__main__":
    main()
