"""A CUDA runtime whose page-locking refuses on purpose."""

from __future__ import annotations


class FakeRuntime:
    """Stands in for `torch.cuda.cudart()`.

    Args:
        quota: bytes that may be page-locked at once.
        num_granted: calls that are granted before every other is refused.

    Attributes:
        locked: address to bytes of what is page-locked.
        last_error: what the next kernel launch would raise; 0 for nothing.
    """

    def __init__(self, *, quota: int = 1 << 60, num_granted: int = 1 << 30) -> None:
        self.quota = quota
        self.num_granted = num_granted
        self.locked: dict[int, int] = {}
        self.last_error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 3  # for every device, and for kernels
        self.num_granted -= 1
        if self.num_granted < 0 or sum(self.locked.values()) + nbytes > self.quota:
            self.last_error = 2
            return 2
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def cudaGetLastError(self) -> int:
        error, self.last_error = self.last_error, 0
        return error
