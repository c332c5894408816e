"""Plan and gather by themselves: microseconds a layer when all hit, GB/s when some miss.

    python bench/device_plan.py --out bench/results/device-plan.json

Experts are copied as they are, and packed12 (Gaussian weights), whose GB/s are those of bf16 in
the slots; "packing" is from tensors on the GPU to rows, their page-locking included. Plans run with
16 programs, packed12 with 32, as the cache has them. Everything runs inside CUDA graphs of many
layers. "Link" is `copy_` of 8 experts from page-locked memory in the same run; "empty" is a graph
of as many empty kernels.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import triton

import machine
from hotexperts.cache.host_memory import HostBuffer
from hotexperts.cache.packed_store import PackedBackingStore
from hotexperts.cache.prefetch import NUM_UNPACKING
from hotexperts.kernels.gather import GatherLayout
from hotexperts.kernels.plan import DEVICE_POLICIES, PlanLayout
from hotexperts.kernels.plan.launch import PlanGather

NUM_LAYERS = 24
PACKING_GB_S: dict[int, float] = {}  # by bytes of an expert
REPEAT = 50


@triton.jit
def empty_kernel(pointer):
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    results: dict[str, Any] = {"all_hits_us_per_layer": all_hits(args.tune)}
    results["copies"] = {name: copies(*shape, args.tune) for name, shape in EXPERTS.items()}
    if args.out:
        machine.write(args.out, "device-plan", results)


EXPERTS = {  # bytes of the two tensors of an expert, experts in the store
    "2.6 MB": ((1_703_936, 851_968), 64),
    "9.4 MB": ((6_291_456, 3_145_728), 32),
    "352 MB": ((234_881_024, 117_440_512), 17),
}


def all_hits(tune: bool) -> dict[str, Any]:
    scalar = torch.zeros(1, device=CUDA)
    table: dict[str, Any] = {"empty": graph_us([lambda: empty_kernel[(16,)](scalar)] * NUM_LAYERS)}
    print("empty", table["empty"])
    cases = [(policy, 128, 32, 1, 8, {}) for policy in DEVICE_POLICIES]
    cases += [("lru", 128, 96, 8, 8, {}), ("lru", 512, 256, 1, 10, {}), ("lru", 128, 96, 32, 8, {})]
    if tune:
        for programs in (1, 8, 16, 32):
            for warps in (1, 4, 8):
                options = {"num_programs": programs, "num_warps": warps}
                cases.append(("lru", 128, 32, 1, 8, options))
    for policy, num_experts, capacity, tokens, k, options in cases:
        name = f"{policy} E={num_experts} C={capacity} ids={tokens * k} {options or ''}".strip()
        table[name] = all_hits_case(policy, num_experts, capacity, tokens, k, options)
        print(name, table[name])
    return table


def all_hits_case(
    policy: str, num_experts: int, capacity: int, tokens: int, k: int, options: dict[str, int]
) -> dict[str, float]:
    layers = []
    rows = pinned_rows(num_experts, 4096)
    for _ in range(NUM_LAYERS):
        layout = PlanLayout(num_experts, capacity, policy)
        gather = GatherLayout.of((0,), (4096,), 4096, capacity)
        kernel = PlanGather(layout, gather, rows, gather.buffer(CUDA), **options)
        ids = torch.randint(0, min(capacity, num_experts), (tokens, k), device=CUDA)
        layers.append((kernel, ids, torch.empty_like(ids)))
    for kernel, ids, out in layers:
        kernel(ids, out)  # fills the slots
    calls = [lambda a=kernel, b=ids, c=out: a(b, c) for kernel, ids, out in layers]
    return graph_us(calls)


def copies(sizes: tuple[int, int], num_experts: int, tune: bool) -> dict[str, Any]:
    row_nbytes = sum(sizes)
    rows = pinned_rows(num_experts, row_nbytes)
    target = torch.empty(8 * row_nbytes // 4, dtype=torch.int32, device=CUDA)
    flat = rows.flatten()
    table: dict[str, Any] = {}
    for count in (1, 2, 4, 8):
        words = count * row_nbytes // 4
        seconds = timed(lambda w=words: target[:w].copy_(flat[:w], non_blocking=True))
        table[f"copy_ x{count}"] = 4 * words / seconds / 1e9
    link = table["copy_ x8"]
    variants = [{}]
    if tune:
        variants = [
            {"num_programs": p, "num_warps": w, "block_words": b}
            for p in (8, 16, 24, 32, 64)
            for w, b in ((8, 4096), (8, 8192), (4, 4096), (16, 8192))
        ]
    plain = GatherLayout.of((0, sizes[0]), sizes, row_nbytes, num_experts // 2)
    packed_rows, packed = pack(sizes, num_experts)
    for options in variants:
        for count in (8,) if tune else (1, 2, 4, 8):
            name = f"gather x{count} {options or ''}".strip()
            table[name] = gather_rate(rows, plain, num_experts, count, options)
            print(f"{row_nbytes / 1e6:.1f} MB {name}: {table[name]:.1f}, link {link:.1f}")
        if packed_rows is not None:
            for count in (8,) if tune else (1, 8):
                name = f"packed12 x{count} {options or ''}".strip()
                how = {"num_programs": NUM_UNPACKING} | options
                table[name] = gather_rate(packed_rows, packed, num_experts, count, how)
                print(f"{row_nbytes / 1e6:.1f} MB {name}: {table[name]:.1f} GB/s of bf16")
    if packed_rows is not None:
        table["packing"] = PACKING_GB_S[row_nbytes]
        table["packed12 part of bytes"] = 4 * packed.row_words / row_nbytes
    table["link"] = link
    return table


def pack(sizes: tuple[int, int], num_experts: int) -> tuple[torch.Tensor | None, GatherLayout]:
    """Rows of Gaussian weights, where they are not too large to make, and how they lie."""
    if sum(sizes) > 1 << 25:
        return None, GatherLayout.of((0,), (4,), 4, 1)
    tensors = {
        name: torch.randn(num_experts, size // 2, device=CUDA).mul_(0.02).bfloat16()
        for name, size in zip(("w13", "w2"), sizes, strict=True)
    }
    store = PackedBackingStore.from_tensors(tensors, CUDA, pin=True)  # compiles, and warms up
    start = time.perf_counter()
    store = PackedBackingStore.from_tensors(tensors, CUDA, pin=True)
    torch.cuda.synchronize()
    PACKING_GB_S[sum(sizes)] = num_experts * sum(sizes) / (time.perf_counter() - start) / 1e9
    KEEP.append(store)
    form = store.form
    layout = GatherLayout.of(form.offsets, sizes, form.row_nbytes, num_experts // 2, form.packings)
    return store.rows.view(torch.int32), layout


def gather_rate(
    rows: torch.Tensor, gather: GatherLayout, num_experts: int, count: int, options: dict[str, int]
) -> float:
    """GB/s into the slots, of a captured call in which `count` of `count` experts miss."""
    layout = PlanLayout(num_experts, num_experts // 2, "lru")
    kernel = PlanGather(layout, gather, rows, gather.buffer(CUDA), **options)
    sequence = []
    for i in range(2 * num_experts // count):  # round and round: LRU misses every time
        ids = [(i * count + j) % num_experts for j in range(count)]
        sequence.append(torch.tensor([ids], device=CUDA))
    calls = [lambda x=ids: kernel(x, torch.empty_like(x)) for ids in sequence]
    for call in calls:
        call()
    before = kernel.counters.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    seconds = timed(graph.replay, repeat=3)
    missed = int((kernel.counters - before)[2]) / 5  # 2 warm-ups and 3 repeats
    return missed * 4 * sum(gather.num_words) / seconds / 1e9


def pinned_rows(num_rows: int, row_nbytes: int) -> torch.Tensor:
    buffer = HostBuffer(num_rows * row_nbytes, pin=True)
    KEEP.append(buffer)
    return buffer.bytes.view(torch.int32).view(num_rows, row_nbytes // 4)


def graph_us(calls: list[Any]) -> dict[str, float]:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    each = [timed(graph.replay, repeat=20) * 1e6 / len(calls) for _ in range(5)]
    return machine.spread(each)


def timed(call: Any, repeat: int = 5) -> float:
    """Seconds a call, by device events over `repeat` calls after two."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    call()
    start.record()
    for _ in range(repeat):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeat


CUDA = torch.device("cuda")
KEEP: list[Any] = []

if __name__ == "__main__":
    main()
