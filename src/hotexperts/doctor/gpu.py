"""The GPU and its link: what it is, what the link is now, and what really goes over it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

from hotexperts.config import format_bytes
from hotexperts.doctor.check import Check, Status

QUERY = {
    "driver": "driver_version",
    "generation": "pcie.link.gen.current",
    "generation_max": "pcie.link.gen.max",
    "lanes": "pcie.link.width.current",
    "lanes_max": "pcie.link.width.max",
}
QUERY_SECONDS = 10  # a driver in trouble may never answer
GB_S_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}  # as the standard has it
GOOD_PART_OF_LINK = 0.75  # of those, after packet headers, copies are expected to reach
GOOD_PART_OF_COPIES = 0.85  # 0.92 on an H200
PROBE_EXPERT_BYTES = 8 << 20
PROBE_EXPERTS = 8


def check_gpus(*, measures: bool) -> Iterator[Check]:
    """Every GPU, and the link of the first.

    Args:
        measures: copy some hundred megabytes.
    """
    try:
        import torch
    except ImportError:
        return  # the versions say so
    if not torch.cuda.is_available():
        remedy = (
            "install a CUDA build of PyTorch and the NVIDIA driver"
            if torch.version.cuda is None
            else "install the NVIDIA driver, or give the container the GPU"
        )
        said = "none: a CPU stands in, to try things on"
        yield Check("GPU", Status.YELLOW, said, remedy)
        return
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)
    facts = query()
    measured = list(_measured(facts)) if measures else []
    if measures:
        facts = query() or facts  # of a link that has just been in use: saving power, it is slower
    yield _link(facts, is_awake=measures)
    yield from measured


def _gpu(index: int) -> Check:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    found = f"{properties.name}, {format_bytes(free)} of {format_bytes(total)} free"
    found += f", CUDA {torch.version.cuda}"
    values = {"total_bytes": total, "free_bytes": free, "cuda": torch.version.cuda}
    if (properties.major, properties.minor) >= (8, 0):
        return Check(f"GPU {index}", Status.GREEN, found, values=values)
    remedy = "works, but bfloat16 is slow there: use --dtype float16"
    return Check(f"GPU {index}", Status.YELLOW, found, remedy, values)


def query() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; empty where it says nothing."""
    command = ["nvidia-smi", f"--id={_first_id()}", f"--query-gpu={','.join(QUERY.values())}"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=QUERY_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(QUERY, (part.strip() for part in done.stdout.split(",")), strict=False))


def _first_id() -> str:
    """What nvidia-smi calls the first GPU that PyTorch sees."""
    import torch

    if not torch.cuda.is_available():
        return "0"
    uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    return f"GPU-{uuid.removeprefix('GPU-')}" if uuid else "0"


def _most(facts: dict[str, str]) -> tuple[int, int] | None:
    """Generation and lanes that the link may have at most; None where nobody says."""
    try:
        return int(facts["generation_max"]), int(facts["lanes_max"])
    except (KeyError, ValueError):
        return None


def _link(facts: dict[str, str], *, is_awake: bool) -> Check:
    """Its generation and lanes now, against what it could have.

    Args:
        facts: nvidia-smi's.
        is_awake: it was in use a moment ago.
    """
    most = _most(facts)
    try:
        now = int(facts["generation"]), int(facts["lanes"])
    except (KeyError, ValueError):
        most = None
    if most is None:
        return Check(
            "link", Status.YELLOW, "unknown", "nvidia-smi does not say: see what is measured"
        )
    values: dict[str, Any] = {"generation": now[0], "lanes": now[1], "driver": facts["driver"]}
    found = f"PCIe {now[0]}.0 x{now[1]}, driver {facts['driver']}"
    if now[1] < most[1]:
        remedy = f"the GPU has {most[1]} lanes: use another slot, or look for what shares its lanes"
        return Check("link", Status.YELLOW, found, remedy, values)
    if now[0] < most[0]:
        remedy = (
            f"the GPU has PCIe {most[0]}.0: look at the slot, a riser, and the BIOS"
            if is_awake
            else f"PCIe {most[0]}.0 under load, if the GPU only saves power now: measure it"
        )
        return Check("link", Status.YELLOW, found, remedy, values)
    return Check("link", Status.GREEN, found, values=values)


def _measured(facts: dict[str, str]) -> Iterator[Check]:
    copied = copy_gb_s()
    generation, lanes = _most(facts) or (0, 0)
    expected = GOOD_PART_OF_LINK * GB_S_PER_LANE.get(generation, 0.0) * lanes
    values = {"copy_gb_s": copied}
    if copied >= expected:
        yield Check("copies", Status.GREEN, f"{copied:.1f} GB/s to the GPU", values=values)
    else:
        remedy = "look for other traffic, the wrong NUMA node, or a slot with fewer lanes"
        said = f"{copied:.1f} GB/s to the GPU, {expected:.0f} expected"
        yield Check("copies", Status.YELLOW, said, remedy, values)
    try:
        gathered = gather_gb_s()
    except ImportError:
        return  # without Triton the host copies
    part, values = gathered / copied, {"gather_gb_s": gathered}
    said = f"{gathered:.1f} GB/s by a kernel, {part:.0%} of copies"
    if part > GOOD_PART_OF_COPIES:
        yield Check("gather kernel", Status.GREEN, said, values=values)
    else:
        remedy = "let the host copy: --cache-mode host"
        yield Check("gather kernel", Status.YELLOW, said, remedy, values)


def copy_gb_s() -> float:
    """Of the copy engine, from page-locked memory."""
    import torch

    from hotexperts.cache.host_memory import HostBuffer

    locked = HostBuffer(PROBE_EXPERTS * PROBE_EXPERT_BYTES, pin=True)
    target = torch.empty_like(locked.bytes, device="cuda")
    return _gb_s(lambda _: target.copy_(locked.bytes, non_blocking=True))


def gather_gb_s() -> float:
    """Of the kernel that plans and copies: every call misses all that it asks for.

    Raises:
        ImportError: Triton is not installed.
    """
    import torch

    from hotexperts.cache import CPUBackingStore
    from hotexperts.cache.device import DeviceWeightProvider

    words = torch.zeros(2 * PROBE_EXPERTS, PROBE_EXPERT_BYTES // 4)
    store = CPUBackingStore.from_tensors({"w": words}, pin=True)
    provider = DeviceWeightProvider(store, PROBE_EXPERTS, policy="lru", device="cuda")
    halves = torch.arange(2 * PROBE_EXPERTS, device="cuda").view(2, 1, PROBE_EXPERTS)
    return _gb_s(lambda step: provider.prepare(halves[step % 2]))


def _gb_s(copy: Any, num_steps: int = 20) -> float:
    import torch

    for step in range(4):
        copy(step)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for step in range(num_steps):
        copy(step)
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return num_steps * PROBE_EXPERTS * PROBE_EXPERT_BYTES / milliseconds / 1e6
