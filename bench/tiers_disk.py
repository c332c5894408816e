"""Experts on disk, on a CPU: reads of a pack beside fio's, and a model of three times its memory.

    python bench/tiers_disk.py --out bench/results/tiers-disk.json [--folder DIR]

fio reads blocks of a row's size at random places of the same file, directly, 8 in flight. Ours
reads rows at random, proves each by its checksum, and ends where the caller has the bytes: `reader`
keeps 8 reads in flight; `calls_of_8` and `calls_of_32` are layer calls with as many misses, whose
rows are also copied into slots, and the next call begins when the last row is there. fio and ours
take turns, and `percent_of_fio` is the median of ours in parts of fio's before and after. Then a
model whose experts take three times the memory they are given generates tokens, which must be those
of the model with all in memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hotexperts.transformers as hot
import machine
from hotexperts.cache.disk import DiskBackingStore
from hotexperts.cache.host_memory import HostBuffer
from hotexperts.cache.pack_file import NUM_READERS, PackFile

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 4096,
}
NUM_SLOTS = 16
NUM_TOKENS = 32
SHARE = 3  # the experts take so many times the memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--repeat", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    args = parser.parse_args()
    if shutil.which("fio") is None:
        parser.error("fio is not installed: apt install fio")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write_checkpoint(folder / "model")
        packing = pack(folder)
        reads = compare_reads(folder / "experts.pack", args.repeat, args.seconds)
        model = run_model(folder)
    for way, row in reads["ways"].items():
        print(f"{way:12} {row['gb_s']['median']:5.2f} GB/s, {row['percent_of_fio']:.0f} % of fio")
    print(json.dumps(model, indent=1))
    if args.out:
        results = {"shape": SHAPE, "packing": packing, "reads": reads, "model": model}
        machine.write(args.out, "tiers-disk", results)


def write_checkpoint(folder: Path) -> None:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(0)
    model = OlmoeForCausalLM(OlmoeConfig(**SHAPE)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="500MB")


def pack(folder: Path) -> dict[str, float]:
    start = time.perf_counter()
    packed = hot.pack(folder / "model", expert_pack=folder / "experts.pack")
    seconds = time.perf_counter() - start
    return {"nbytes": packed.nbytes, "seconds": seconds, "gb_s": packed.nbytes / seconds / 1e9}


def compare_reads(path: Path, repeat: int, seconds: float) -> dict[str, Any]:
    pack = PackFile(path)
    row_nbytes = pack.header.layers[0].row_stride
    ways: dict[str, Callable[[float], float]] = {
        "reader": lambda s: read_rows(pack, s),
        "calls_of_8": lambda s: read_calls(pack, 8, s),
        "calls_of_32": lambda s: read_calls(pack, 32, s),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    fios = [fio(path, row_nbytes, seconds)]
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, read in ways.items():
            found[name].append(read(seconds))
            fios.append(fio(path, row_nbytes, seconds))
            ratios[name].append(100 * found[name][-1] / statistics.fmean(fios[-2:]))
    return {
        "row_nbytes": row_nbytes,
        "in_flight": NUM_READERS,
        "is_direct": pack.reason is None,
        "fio_gb_s": machine.spread(fios),
        "ways": {
            name: {
                "gb_s": machine.spread(found[name]),
                "percent_of_fio": statistics.median(ratios[name]),
                "percents": ratios[name],
            }
            for name in ways
        },
    }


def fio(path: Path, block: int, seconds: float) -> float:
    """GB/s of random direct reads of one file."""
    command = [
        "fio",
        "--name=read",
        f"--filename={path}",
        "--readonly",
        "--rw=randread",
        f"--bs={block}",
        "--direct=1",
        "--ioengine=io_uring",
        f"--iodepth={NUM_READERS}",
        "--time_based",
        f"--runtime={seconds}",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"] / 1e9


def read_rows(pack: PackFile, seconds: float) -> float:
    """GB/s of rows at random, 8 always in flight, and as many waiting."""
    layers = pack.header.layers
    stride = layers[0].row_stride
    memory = HostBuffer(2 * NUM_READERS * stride, pin=False).bytes.view(-1, stride)
    memory.fill_(1)  # or the first reads also find the pages
    free = [memoryview(row.numpy()).cast("B") for row in memory]
    under_way: deque[tuple[Any, memoryview]] = deque()
    draws, num_read = random.Random(0), 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        while free:
            layer = draws.randrange(len(layers))
            buffer = free.pop()
            expert = draws.randrange(layers[layer].num_experts)
            under_way.append((pack.begin_read(layer, expert, buffer), buffer))
        done, buffer = under_way.popleft()
        done.result()
        num_read += 1
        free.append(buffer)
    for done, _ in under_way:
        done.result()
    num_read += len(under_way)
    return num_read * stride / (time.perf_counter() - start) / 1e9


def read_calls(pack: PackFile, num_missed: int, seconds: float) -> float:
    """GB/s read from disk by layer calls that miss so many experts."""
    layers = pack.header.layers
    stores = [DiskBackingStore(pack, layer, num_missed) for layer in range(len(layers))]
    _, slots = layers[0].layout.allocate(num_missed, torch.device("cpu"))
    draws = random.Random(0)

    def call(store: DiskBackingStore) -> None:
        experts = draws.sample(range(store.num_experts), num_missed)
        store.expect(experts)
        for slot, expert in enumerate(experts):
            store.copy_into(expert, [tensor[slot] for tensor in slots])

    for store in stores:  # finds the pages
        call(store)
        store.reset_counts()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for store in stores:
            call(store)
    took = time.perf_counter() - start
    return sum(store.counts.disk_bytes for store in stores) / took / 1e9


def run_model(folder: Path) -> dict[str, Any]:
    expert_nbytes = (folder / "experts.pack").stat().st_size
    gib = expert_nbytes / SHARE / 2**30
    prompt = torch.randint(0, SHAPE["vocab_size"], (1, 16), generator=torch.manual_seed(1))
    rows: dict[str, Any] = {}
    tokens = {}
    for name, options in (
        ("ram", {"expert_store": "ram"}),
        (
            "disk",
            {
                "expert_store": "disk",
                "expert_pack": folder / "experts.pack",
                "expert_ram_gib": gib,
            },
        ),
    ):
        model = hot.load(
            folder / "model",
            expert_cache_size=NUM_SLOTS,
            device="cpu",
            cache_mode="host",
            **options,
        )
        start = time.perf_counter()
        tokens[name] = model.generate(
            prompt, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
        )
        seconds = time.perf_counter() - start
        cache = model.expert_cache
        rows[name] = {
            "host_nbytes": cache.host_nbytes,
            "reason": cache.store_reason,
            "load_seconds": cache.load_seconds,
            "tokens_per_second": NUM_TOKENS / seconds,
            "stats": cache.stats.as_dict(),
        }
        del model, cache
        gc.collect()
    equal = torch.equal(tokens["ram"], tokens["disk"])
    if not equal:
        raise SystemExit("the tokens differ: no figures")
    return {
        "expert_nbytes": expert_nbytes,
        "num_slots": NUM_SLOTS,
        "num_tokens": NUM_TOKENS,
        "tokens_equal": equal,
        "experts_over_memory": expert_nbytes / rows["disk"]["host_nbytes"],
        "stores": rows,
    }


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
