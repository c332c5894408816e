"""Small experts in host memory, plain ones in slots: what the link delivers, and decode with them.

    python bench/tiers_gpu.py --traces DIR --out bench/results/tiers-gpu.json

"forms" are GB/s into the slots, counted as bf16, of layer calls in a CUDA graph of which all 8
experts miss (9.4 MB each, random codes), each with the number of programs that was fastest, beside
`copy_`; a few slots of each are compared with what PyTorch unpacks. The others are decode of the
OLMoE-1B-7B shape at 6 GiB (`bench/device_decode.py`: replay R2, one graph a step), experts as they
are, packed12, or quantised while loading, with the relative error that this made.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

import cases
import device_decode
import machine
import olmoe
from device_plan import timed
from hotexperts.cache import CPUBackingStore
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.cache.packed_store import PackedBackingStore
from hotexperts.cache.store import RowForm
from hotexperts.formats import ExpertLayout, TensorSpec
from hotexperts.kernels.gather import codes
from hotexperts.kernels.gather.scaled import Scaled, by_row

QUANTISED = ("fp8", "int8", "int4")
CASES = ("forms", "none", "packed12", *QUANTISED)
BF16 = torch.bfloat16
LAYOUT = ExpertLayout((TensorSpec("w13", (1536, 2048), BF16), TensorSpec("w2", (2048, 768), BF16)))
NUM_EXPERTS, CAPACITY, TOP_K = 64, 32, 8
NUMS_OF_PROGRAMS = (16, 32, 48)
STEPS, SEQUENCES = 200, 4


def main() -> None:
    about = {"shape": olmoe.SHAPE, "replay": "R2", "expert_nbytes": LAYOUT.row_nbytes}
    benchmark = cases.Benchmark("tiers-gpu", CASES, measure, about, lambda table: {}, show)
    cases.run(benchmark, cases.parser(__doc__).parse_args())


def show(row: cases.Row) -> str:
    if "forms" in row:
        lines = (f"\n  {name:12} {found}" for name, found in row["forms"].items())
        return f"link {row['link_gb_s']:.1f} GB/s" + "".join(lines)
    return f"{row['tokens_per_s']:.1f} tokens/s, {row['host_bytes'] / 1e9:.2f} GB of host memory"


def measure(case: str, args: argparse.Namespace) -> cases.Row:
    if case == "forms":
        found = {name: form(name) for name in (*FORMS, "packed12")}
        return {"link_gb_s": machine.link_gb_s(), "forms": found}
    return decode(case, args)


def decode(case: str, args: argparse.Namespace) -> cases.Row:
    """The cached model with its experts in this form."""
    import hotexperts.transformers as hot

    model = olmoe.build("cuda")
    is_quantised = case in QUANTISED
    hot.attach(
        model,
        expert_cache_size="6GiB",
        expert_packing="auto" if is_quantised else case,
        expert_dtype=case if is_quantised else "none",
        cache_mode="device",
        kv_tokens=device_decode.MAX_POSITIONS,
        device="cuda",
    )
    run = device_decode.Decode(model, args.traces / olmoe.TRACE)
    for sequence in range(SEQUENCES):
        run.sequence(sequence, STEPS)
    cache = model.expert_cache
    errors = list(cache.relative_errors.values())
    return {
        "tokens_per_s": 1e3 * len(run.step_ms) / sum(run.step_ms),
        "step_ms": machine.spread(run.step_ms),
        "prefill_ms": machine.spread(run.prefill_ms),
        "link_gb_s": machine.link_gb_s(),
        "host_bytes": cache.host_nbytes,
        "capacity": cache.capacity,
        "hit_rate": run.hits / (run.hits + run.misses),
        "bytes_per_step": run.bytes_moved / len(run.step_ms),
        "relative_error": machine.spread(errors) if errors else None,
    }


def form(name: str) -> dict[str, Any]:
    """GB/s of bf16 at the best number of programs."""
    store = make_store(name)
    rates = {str(n): rate(store, n) for n in NUMS_OF_PROGRAMS}
    best = max(rates, key=lambda n: rates[n])
    row_nbytes = store.host_nbytes / store.num_experts
    part = row_nbytes / LAYOUT.row_nbytes
    return {"gb_s": rates[best], "programs": int(best), "part_of_bytes": part, "by_programs": rates}


def make_store(name: str) -> Any:
    """Rows of random codes; of the packed ones, Gaussian weights."""
    if name == "packed12":
        tensors = {
            spec.name: torch.randn(NUM_EXPERTS, *spec.shape, device="cuda").mul_(0.02).to(BF16)
            for spec in LAYOUT.specs
        }
        return PackedBackingStore.from_tensors(tensors, torch.device("cuda"), pin=True)
    packings = tuple(FORMS[name](spec) for spec in LAYOUT.specs)
    if packings[0] is None:
        store: Any = CPUBackingStore(LAYOUT, NUM_EXPERTS, pin=True)
    else:
        row_form = RowForm.packed(LAYOUT, packings)
        store = PackedBackingStore(LAYOUT, NUM_EXPERTS, row_form, pin=True)
    store.rows.random_(0, 120)  # no byte of which is a NaN, as a code or as a scale
    return store


FORMS: dict[str, Any] = {
    "none": lambda spec: None,
    "int8": lambda spec: by_row(codes.INT8, spec.shape, 128, 16, BF16),
    "fp8": lambda spec: by_row(codes.E4M3, spec.shape, 128, 16, BF16),
    "fp8 blocks": lambda spec: Scaled(codes.E4M3, *spec.shape, 128, 128, 32, BF16),
    "int4": lambda spec: by_row(codes.INT4, spec.shape, 32, 16, BF16),
    "mxfp4": lambda spec: Scaled(codes.E2M1, *spec.shape, 32, 1, 8, BF16),
}


def rate(store: Any, num_programs: int) -> float:
    """GB/s into the slots, of a captured call whose experts all miss.

    Raises:
        AssertionError: a slot has other bits than its row, unpacked.
    """
    device = torch.device("cuda")
    provider = DeviceWeightProvider(
        store, CAPACITY, policy="lru", device=device, num_programs=num_programs
    )
    first = range(0, 2 * NUM_EXPERTS, TOP_K)  # round and round: LRU misses every time
    calls = [torch.arange(i, i + TOP_K, device=device)[None] % NUM_EXPERTS for i in first]
    for ids in calls:
        provider.prepare(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for ids in calls:
            provider.prepare(ids)
    provider.reset_stats()
    seconds = timed(graph.replay, repeat=3)
    misses = provider.stats.misses / 5  # 2 warm-ups and 3 repeats
    check_bits(store, provider)
    return misses * LAYOUT.row_nbytes / seconds / 1e9


def check_bits(store: Any, provider: Any) -> None:
    slot_of = provider.slot_of
    for expert in range(0, NUM_EXPERTS, 7):
        slot = slot_of[expert]
        if slot < 0:
            continue
        wanted = [torch.empty(s.shape, dtype=s.dtype, device="cuda") for s in LAYOUT.specs]
        store.copy_into(expert, wanted)
        for tensor, row in zip(provider.slot_tensors, wanted, strict=True):
            assert torch.equal(tensor[slot].view(torch.int16), row.view(torch.int16)), expert


if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    main()
