"""Page-locking: what the CUDA runtime grants, and nothing left behind where it refuses."""

from __future__ import annotations

import ctypes
import resource
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from hotexperts.config import format_bytes

_PORTABLE_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class Held(Enum):
    """How host memory is held, the best first."""

    PAGE_LOCKED = "page-locked"  # kernels and the copy engine read it
    LOCKED = "locked"  # never swapped out, but the GPU cannot read it
    PAGEABLE = "pageable"  # nor that


def page_lock(cudart: Any, address: int, nbytes: int) -> str | None:
    """Page-lock memory for every CUDA device.

    Args:
        cudart: `torch.cuda.cudart()`.
        address: of the first byte.
        nbytes: at least 1.

    Returns:
        None, or why it was refused; then nothing is page-locked.
    """
    status = int(cudart.cudaHostRegister(address, nbytes, _PORTABLE_MAPPED))
    if status == 0:
        return None
    forget_last_error(cudart)
    return f"CUDA error {status}; RLIMIT_MEMLOCK is {memlock_limit()}"


def forget_last_error(cudart: Any) -> None:
    """The runtime keeps a failed call's error, and the next kernel launch would raise it."""
    if hasattr(cudart, "cudaGetLastError"):
        cudart.cudaGetLastError()
        return
    for runtime in _loaded_runtimes():  # which of several PyTorch calls is not said
        runtime.cudaGetLastError()
    with suppress(RuntimeError):  # a launch's check takes the error away when it raises it
        torch.zeros(1, device="cuda")


def _loaded_runtimes() -> list[Any]:
    """The CUDA runtimes that this process has loaded, which keep the errors of a thread."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines)
    names = [path for path in paths if path.rpartition("/")[2].startswith("libcudart")]
    found = []
    for path in names:
        with suppress(OSError):  # a file that was replaced since: what it was is not to be had
            found.append(ctypes.CDLL(path))
    return found


def lock(address: int, nbytes: int) -> Held:
    """Keep memory that was not page-locked from being swapped out, where the system allows it."""
    libc = ctypes.CDLL(None)
    is_locked = libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0
    return Held.LOCKED if is_locked else Held.PAGEABLE


def memlock_limit() -> str:
    """The soft limit on locked memory, for people."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
