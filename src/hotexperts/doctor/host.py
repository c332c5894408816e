"""The host: memory for experts, how much of it may be page-locked, pages, nodes, and the disk."""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hotexperts.cache.host_memory import available_host_bytes
from hotexperts.config import format_bytes
from hotexperts.doctor.check import Check, Status

ENOUGH_MEMORY_BYTES = 16 << 30  # experts of a small model in 16 bits
DISK_PROBE_BYTES = 256 << 20
DISK_BLOCK_BYTES = 4 << 20
GOOD_DISK_GB_S = 2.0
NVIDIA = "0x10de"  # as PCI has it


def check_host(root: Path = Path("/")) -> Iterator[Check]:
    """Memory, page-locking, huge pages, NUMA.

    Args:
        root: where `sys` is.
    """
    available_bytes = available_host_bytes()
    yield _memory(available_bytes)
    yield _memlock(available_bytes)
    yield _huge_pages(root)
    yield _nodes(root)


def _memory(available_bytes: int) -> Check:
    found, values = (
        f"{format_bytes(available_bytes)} available",
        {"available_bytes": available_bytes},
    )
    if available_bytes >= ENOUGH_MEMORY_BYTES:
        return Check("host memory", Status.GREEN, found, values=values)
    remedy = "leave the experts in the checkpoint (--expert-store file), or free memory"
    return Check("host memory", Status.YELLOW, found, remedy, values)


def _memlock(available_bytes: int) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= available_bytes:
        found = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
        return Check("page-locked memory", Status.GREEN, found)
    remedy = (
        "where page-locking fails, raise the limit: ulimit -l unlimited "
        "(docker: --ulimit memlock=-1)"
    )
    found = f"limited to {format_bytes(soft)} a process"
    return Check("page-locked memory", Status.YELLOW, found, remedy, {"memlock_bytes": soft})


def _huge_pages(root: Path) -> Check:
    text = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if text is None:
        return Check("huge pages", Status.YELLOW, "unknown", "nothing: the kernel does not say")
    choice = text[text.find("[") + 1 : text.find("]")]
    if choice in ("always", "madvise"):
        return Check("huge pages", Status.GREEN, choice)
    remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: loading is faster"
    return Check("huge pages", Status.YELLOW, choice or "unknown", remedy)


def _nodes(root: Path) -> Check:
    """Experts are copied fastest from memory on the GPU's own node."""
    paths = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    allowed = os.sched_getaffinity(0)
    ours = [int(p.name[4:]) for p in paths if allowed & _cpus(_read(p / "cpulist") or "")]
    gpus = _nodes_of_gpus(root)
    values = {"nodes": len(paths), "process_nodes": ours, "gpu_nodes": gpus}
    if len(paths) <= 1:
        return Check("NUMA", Status.GREEN, "one node", values=values)
    found = f"{len(paths)} nodes, this process on {_named(ours)}, GPUs on {_named(gpus)}"
    if len(gpus) == 1 and ours == gpus:
        return Check("NUMA", Status.GREEN, found, values=values)
    node = gpus[0] if len(gpus) == 1 else "N"
    remedy = f"run on the GPU's node: numactl --cpunodebind={node} --membind={node}"
    if node == "N":
        remedy += " (nvidia-smi topo -m)"
    return Check("NUMA", Status.YELLOW, found, remedy, values)


def _nodes_of_gpus(root: Path) -> list[int]:
    """Of NVIDIA's, where the system says."""
    found = set()
    for path in (root / "sys/bus/pci/devices").glob("*"):
        is_display = (_read(path / "class") or "").startswith("0x03")
        if is_display and (_read(path / "vendor") or "").strip() == NVIDIA:
            found.add(int((_read(path / "numa_node") or "-1").strip()))
    return sorted(found - {-1})


def _cpus(text: str) -> set[int]:
    """Numbers from "0-3,8"."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {n for low, _, high in ranges for n in range(int(low), int(high or low) + 1)}


def _named(nodes: list[int]) -> str:
    return ", ".join(map(str, nodes)) or "an unknown one"


def check_disk(folder: Path) -> Check:
    """Reads a file of 256 MiB around the page cache, where the file system allows that."""
    try:
        speed = measure_disk(folder)
    except OSError as error:
        remedy = "name a --folder on the checkpoints' disk that can be written to"
        return Check("disk", Status.YELLOW, f"not measured: {error.strerror}", remedy)
    found, values = f"{speed:.1f} GB/s in {folder}", {"read_gb_s": speed}
    if speed >= GOOD_DISK_GB_S:
        return Check("disk", Status.GREEN, found, values=values)
    remedy = "keep the experts in memory (--expert-store ram), or the checkpoint on an NVMe disk"
    return Check("disk", Status.YELLOW, found, remedy, values)


def measure_disk(folder: Path, num_bytes: int = DISK_PROBE_BYTES) -> float:
    """GB/s of sequential reads of a new file, which is removed.

    Raises:
        OSError: no room, no rights, or no direct reads there.
    """
    block = mmap.mmap(-1, DISK_BLOCK_BYTES)  # page-aligned, as direct reads want it
    block.write(os.urandom(DISK_BLOCK_BYTES))
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(num_bytes // DISK_BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        try:
            start = time.perf_counter()
            while os.readv(descriptor, [block]):
                pass
            return num_bytes / (time.perf_counter() - start) / 1e9
        finally:
            os.close(descriptor)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
