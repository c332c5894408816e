"""How fast the link to the device is."""

from __future__ import annotations

import functools
import statistics
import time

import torch

from hotexperts.cache.host_memory import HostBuffer

_PROBE_NBYTES = 1 << 26
_REPEATS = 5


def link_gb_s(nbytes: int, device: torch.device) -> float:
    """GB/s of `copy_` of so many bytes to the device, from page-locked memory where it is a GPU.

    Raises:
        HostMemoryError: the memory, or its page-locking, is refused.
    """
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


@functools.cache
def probed_gb_s(device: torch.device) -> float:
    """The same of 64 MiB, measured once a process."""
    return link_gb_s(_PROBE_NBYTES, device)
