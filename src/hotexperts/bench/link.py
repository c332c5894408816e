"""How fast the host's memory reaches the device."""

from __future__ import annotations

import statistics
import time

import torch

from hotexperts.cache.host_memory import HostBuffer

_REPEATS = 10


def link_gb_s(nbytes: int, device: torch.device) -> float:
    """GB/s of `copy_` of so many bytes to the device, from page-locked memory where it is a GPU."""
    is_gpu = device.type == "cuda"
    source = HostBuffer(nbytes, pin=is_gpu)
    target = torch.empty_like(source.bytes, device=device)
    taken = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        target.copy_(source.bytes, non_blocking=True)
        if is_gpu:
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return nbytes / statistics.median(taken[1:]) / 1e9
