"""Host memory of the exact size, page-locked for the GPU, and how much of it there is."""

from __future__ import annotations

import mmap
import resource
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hotexperts.config import format_bytes
from hotexperts.errors import HostMemoryError

_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
_KEEP_IN_FILE = "keep the experts in the file (expert_store='file', --expert-store file)"
_REGISTER_PORTABLE_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class HostBuffer:
    """Zeroed host bytes of the exact size, page-aligned, page-locked while this object lives.

    PyTorch's own page-locked allocator rounds up to a power of two, up to twice the memory; this
    maps pages and registers them with `cudaHostRegister`. Views of `bytes` may outlive the
    object: their memory stays, only the page-locking ends.

    Args:
        nbytes: at least 1.
        pin: page-lock for every CUDA device.

    Attributes:
        bytes: uint8 `[nbytes]`.

    Raises:
        HostMemoryError: the system refuses the memory or its page-locking.
    """

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise HostMemoryError(
                f"cannot map {format_bytes(nbytes)} of host memory ({error}): "
                f"{_KEEP_IN_FILE}, or free memory"
            ) from error
        with suppress(OSError):  # a kernel without huge pages: slower, not wrong
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)
        if pin:
            self._page_lock(torch.cuda.cudart())

    def _page_lock(self, cudart: Any) -> None:
        address, nbytes = self.bytes.data_ptr(), self.bytes.numel()
        status = int(cudart.cudaHostRegister(address, nbytes, _REGISTER_PORTABLE_MAPPED))
        if status != 0:
            raise HostMemoryError(
                f"cannot page-lock {format_bytes(nbytes)} of host memory (CUDA error {status}; "
                f"RLIMIT_MEMLOCK is {memlock_limit()}): raise the limit (ulimit -l unlimited), "
                f"or {_KEEP_IN_FILE}"
            )
        unregister = weakref.finalize(self, _unlock, cudart, address)
        unregister.atexit = False  # the process's end frees it, after the CUDA context is gone


def _unlock(cudart: Any, address: int) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a copy may still read
    cudart.cudaHostUnregister(address)


def memlock_limit() -> str:
    """The soft limit on locked memory, for people."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)


def available_host_bytes() -> int:
    """Bytes that can be allocated now: the kernel's estimate, or less where a cgroup says so."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    available = values["MemAvailable"]
    for limit_file, usage_file in _CGROUP_LIMITS:
        try:
            limit = Path(limit_file).read_text().strip()
            usage = int(Path(usage_file).read_text())
        except OSError:
            continue
        if limit != "max":
            available = min(available, max(0, int(limit) - usage))
    return available


def require_host_bytes(needed: int, purpose: str) -> None:
    """Refuse before the work begins, not when the system kills the process.

    Raises:
        HostMemoryError: less than `needed` bytes are available.
    """
    available = available_host_bytes()
    if needed > available:
        raise HostMemoryError(
            f"{purpose} needs {format_bytes(needed)} of host memory, {format_bytes(available)} "
            f"is available: {_KEEP_IN_FILE}, free memory, or skip this check where memory grows "
            "on demand (check_host_memory=False, --no-host-memory-check)"
        )
