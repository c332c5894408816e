"""Whose turn it is: a model's caches serve one thread at a time, and one stream after another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hotexperts.errors import ConcurrentUseError


class Turn:
    """Shared by all caches that share banks or bounce rows: one layer call at a time.

    Args:
        device: where the slots are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._busy = threading.Lock()
        self._last_stream: torch.cuda.Stream | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, nobody else is. A stream other than the last one first waits for that.

        Raises:
            ConcurrentUseError: another thread is inside.
        """
        if not self._busy.acquire(blocking=False):
            raise ConcurrentUseError(
                "two threads are in the same expert cache: give each its own model, or take turns"
            )
        try:
            self._follow_last_stream()
            yield
        finally:
            self._busy.release()

    def _follow_last_stream(self) -> None:
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._last_stream is not None and stream != self._last_stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream
