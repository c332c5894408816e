"""Whose turn it is: a model's caches serve one thread at a time, and one stream after another."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hotexperts.errors import ConcurrentUseError


class _Token:
    """Lives as long as the call that holds the turn."""


def _nobody() -> None:
    return None


class Turn:
    """Shared by all caches that share banks or bounce rows: one layer call at a time.

    The turn ends when the call says so, or when an interrupt kept it from saying so and its frame
    is gone: a lock that is held for good would need a new model.

    Args:
        device: where the slots are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._looking = threading.Lock()
        self._holder: Callable[[], _Token | None] = _nobody
        self._last_stream: torch.cuda.Stream | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, nobody else is. A stream other than the last one first waits for that.

        Raises:
            ConcurrentUseError: another thread is inside.
        """
        token = _Token()
        with self._looking:
            if self._holder() is not None:
                raise ConcurrentUseError(
                    "two threads are in the same expert cache: give each its own model, or take "
                    "turns"
                )
            self._holder = weakref.ref(token)
        try:
            self._follow_last_stream()
            yield
        finally:
            self._holder = _nobody

    def _follow_last_stream(self) -> None:
        if self._device.type != "cuda":
            return
        if torch.cuda.is_current_stream_capturing():  # torch.cuda.graph waits before it captures
            return
        stream = torch.cuda.current_stream(self._device)
        if self._last_stream is not None and stream != self._last_stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream
