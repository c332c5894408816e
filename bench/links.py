"""What comes over the host's links while one GPU copies, and while all do."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SECONDS = 0.4  # that every GPU copies
EXPERT_NBYTES = 9_437_184
NUM_EXPERTS = 8  # at once
WAYS = ("copy_", "gather")


def measure(num_gpus: int) -> dict[str, Any]:
    """GB/s of each GPU alone and of all at once, and where they are plugged in.

    Where the host has several NUMA nodes, from memory of each of them; `gb_s` is then that from the
    GPU's own.
    """
    context = torch.multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(num_gpus, timeout=60), context.Queue()
    nodes = numa_nodes()
    workers = [
        context.Process(target=_work, args=(gpu, num_gpus, nodes, barrier, results))
        for gpu in range(num_gpus)
    ]
    for worker in workers:
        worker.start()
    try:
        found = sorted((results.get(timeout=120) for _ in workers), key=lambda row: row["gpu"])
    finally:
        for worker in workers:
            worker.join(timeout=10)
            worker.kill()
    return {
        "gpus": found,
        "numa_nodes": nodes,
        "topology": _nvidia_smi("topo", "-m"),
        **_sums(found),
    }


def _sums(gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all GPUs together, on their own nodes, against the sum of each alone."""
    found: dict[str, Any] = {}
    for way in WAYS:
        rows = [gpu["gb_s"][way] for gpu in gpus if way in gpu["gb_s"]]
        if len(rows) == len(gpus):
            alone = sum(row["alone"] for row in rows)
            together = sum(row["together"] for row in rows)
            found[way] = {"alone": alone, "together": together, "part": together / alone}
    return found


def _work(gpu: int, num_gpus: int, nodes: dict[int, list[int]], barrier: Any, results: Any) -> None:
    """One GPU's copies, in turn with the others and with them."""
    row: dict[str, Any] = {"gpu": gpu}
    device = torch.device("cuda", gpu) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        row |= place(gpu)
    torch.set_num_threads(1)  # threads of a pool would touch memory from where they were started
    everywhere = sorted(os.sched_getaffinity(0))
    by_node: dict[int, Any] = {}
    for node, cpus in nodes.items() if len(nodes) > 1 else [(0, everywhere)]:
        os.sched_setaffinity(0, cpus)
        copies = _copies(device).items()
        by_node[node] = {way: _rates(copy, gpu, num_gpus, barrier) for way, copy in copies}
    home = row.get("numa_node", -1)
    row |= {"gb_s_by_node": by_node, "gb_s": by_node.get(home, next(iter(by_node.values())))}
    results.put(row)


def _copies(device: torch.device) -> dict[str, Callable[[int], Any]]:
    """A way of copying `NUM_EXPERTS` experts, called with the number of the call."""
    from hotexperts.cache import CPUBackingStore

    is_cuda = device.type == "cuda"
    words = torch.zeros(2 * NUM_EXPERTS, EXPERT_NBYTES // 4)
    store = CPUBackingStore.from_tensors({"w": words}, pin=is_cuda)
    half = store.rows[:NUM_EXPERTS]
    target = torch.empty_like(half, device=device)
    found: dict[str, Callable[[int], Any]] = {
        "copy_": lambda _: (target.copy_(half, non_blocking=True), store)
    }
    if is_cuda:
        from hotexperts.cache.device import DeviceWeightProvider

        provider = DeviceWeightProvider(store, NUM_EXPERTS, policy="lru", device=device)
        halves = torch.arange(2 * NUM_EXPERTS, device=device).view(2, 1, NUM_EXPERTS)
        found["gather"] = lambda step: provider.prepare(halves[step % 2])
    return found


def _rates(copy: Callable[[int], Any], gpu: int, num_gpus: int, barrier: Any) -> dict[str, float]:
    """GB/s while the others wait, and while they copy as well."""
    found = {}
    for turn in range(num_gpus):
        barrier.wait()
        if turn == gpu:
            found["alone"] = _rate(copy)
    barrier.wait()
    found["together"] = _rate(copy)
    barrier.wait()
    return found


def _rate(copy: Callable[[int], Any]) -> float:
    """GB/s over `SECONDS`: for as long as all others copy, whatever each of them reaches."""
    for step in range(4):
        copy(step)
    _wait()
    start, num_copies = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        for _ in range(4):
            copy(num_copies)
            num_copies += 1
        _wait()
    return num_copies * NUM_EXPERTS * EXPERT_NBYTES / (time.perf_counter() - start) / 1e9


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def place(gpu: int) -> dict[str, Any]:
    """Where a GPU is plugged in: its bus number, its lanes, what is above it, and its NUMA node."""
    fields = ("pci.bus_id", "pcie.link.gen.current", "pcie.link.width.current")
    said = _nvidia_smi(f"--id={gpu}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    if said is None:
        return {}
    bus, generation, lanes = said.strip().split(", ")
    found: dict[str, Any] = {"bus": bus, "generation": generation, "lanes": lanes}
    folder = Path("/sys/bus/pci/devices") / bus.lower()[-len("0000:00:00.0") :]
    if folder.exists():
        found["above"] = [part for part in folder.resolve().parts if ":" in part][:-1]
        found["numa_node"] = int((folder / "numa_node").read_text())
    return found


def numa_nodes() -> dict[int, list[int]]:
    """CPUs of each NUMA node that this process may use."""
    allowed = os.sched_getaffinity(0)
    found: dict[int, list[int]] = {}
    for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        cpus = [c for c in _cpus((folder / "cpulist").read_text()) if c in allowed]
        if cpus:
            found[int(folder.name.removeprefix("node"))] = cpus
    return found


def _cpus(text: str) -> list[int]:
    """`0-3,8` as numbers."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return found


def _nvidia_smi(*arguments: str) -> str | None:
    """What it says, where it is there."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
