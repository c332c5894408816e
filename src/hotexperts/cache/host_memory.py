"""Host memory of the exact size, page-locked for the GPU, and how much of it there is."""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from hotexperts.cache import numa
from hotexperts.cache.page_lock import Held, lock, page_lock
from hotexperts.config import format_bytes
from hotexperts.errors import HostMemoryError

# Of each version its tree, files of the limit and of what is used; what of it is files that were
# read and not lately.
_CGROUP_LIMITS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_KEEP_IN_FILE = "keep the experts in the file (expert_store='file', --expert-store file)"
_RAISE_LIMIT = "raise the limit (ulimit -l unlimited; in a container --ulimit memlock=-1)"


class PageLockError(HostMemoryError):
    """The system has the memory, but does not page-lock it.

    Attributes:
        nbytes: how much was refused.
        refusal: in what words.
    """

    def __init__(self, nbytes: int, refusal: str) -> None:
        super().__init__(
            f"page-locking {format_bytes(nbytes)} of host memory was refused ({refusal}): "
            f"{_RAISE_LIMIT}, or {_KEEP_IN_FILE}"
        )
        self.nbytes = nbytes
        self.refusal = refusal

    def needed_by(self, option: str, otherwise: str) -> HostMemoryError:
        """The error where an option cannot do without, and what to do instead."""
        return HostMemoryError(
            f"{option} needs page-locked memory, and page-locking {format_bytes(self.nbytes)} of "
            f"it was refused ({self.refusal}): {_RAISE_LIMIT}, or {otherwise}"
        )


class HostBuffer:
    """Zeroed host bytes of the exact size, page-aligned, page-locked while this object lives.

    PyTorch's own page-locked allocator rounds up to a power of two, up to twice the memory; this
    maps pages and registers them with `cudaHostRegister`. Views of `bytes` may outlive the
    object: their memory stays, only the page-locking ends.

    Args:
        nbytes: at least 1.
        pin: page-lock for every CUDA device, near the current one.
        steps_back: where page-locking is refused, hold the memory as well as it goes instead.

    Attributes:
        bytes: uint8 `[nbytes]`.
        held: how the memory is held.
        refusal: why it is not page-locked; None where it is, or was not to be.
        node: the NUMA node that it was asked from; None where the system chooses.

    Raises:
        HostMemoryError: the system refuses the memory.
        PageLockError: it refuses the page-locking, and nobody steps back.
    """

    def __init__(self, nbytes: int, *, pin: bool, steps_back: bool = False) -> None:
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
        self.held = Held.PAGEABLE
        self.refusal: str | None = None
        self.node: int | None = None
        if pin:
            self._place()
            self._page_lock(torch.cuda.cudart(), steps_back)

    def _place(self) -> None:
        node = numa.node_of_current_gpu()
        if node is not None and numa.prefer(node, self.bytes.data_ptr(), self.bytes.numel()):
            self.node = node

    def _page_lock(self, cudart: Any, steps_back: bool) -> None:
        address, nbytes = self.bytes.data_ptr(), self.bytes.numel()
        self.refusal = page_lock(cudart, address, nbytes)
        if self.refusal is None:
            self.held = Held.PAGE_LOCKED
            unregister = weakref.finalize(self, _unlock, cudart, address)
            unregister.atexit = False  # the process's end frees it, after the CUDA context is gone
        elif steps_back:
            self.held = lock(address, nbytes)
        else:
            raise PageLockError(nbytes, self.refusal)


def _unlock(cudart: Any, address: int) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a copy may still read
    cudart.cudaHostUnregister(address)


def available_host_bytes(
    cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Bytes that can be allocated now: the kernel's estimate, or less where a cgroup says so.

    A cgroup counts files that were read as memory used; the kernel gives up those not in use. The
    limit may be the process's own group's (a batch system's job, a service) or one's above it.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    available = values["MemAvailable"]
    for tree, limit_file, usage_file, idle in _CGROUP_LIMITS:
        for group in _groups(membership, tree):
            folder = cgroups / tree / group
            try:
                limit = (folder / limit_file).read_text().strip()
                usage = int((folder / usage_file).read_text())
            except OSError:  # none, or of a tree that is mounted from this group on
                continue
            if limit != "max":
                usage -= _counter(folder / "memory.stat", idle)
                available = min(available, max(0, int(limit) - usage))
    return available


def _groups(membership: Path, tree: str) -> list[PurePosixPath]:
    """The process's group in a tree, "" or "memory", and all above it, relative to the root."""
    own = ""
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = path.lstrip("/") if tree in controllers.split(",") else own
    group = PurePosixPath(own)
    return [group, *group.parents] if ".." not in group.parts else [PurePosixPath()]


def _counter(path: Path, name: str) -> int:
    """One line of a cgroup's statistics; 0 where there is none."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(words[1]) for words in lines if words[:1] == [name]), 0)


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
