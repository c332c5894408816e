"""Copies beside compute: a copy stream, and the two banks through which a large call streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hotexperts.cache.store import ExpertStore
from hotexperts.cache.turn import Turn
from hotexperts.formats import ExpertLayout

NUM_BANKS = 2


class CopyLane:
    """A side stream for copies, ordered against the compute stream by events.

    On a CPU everything happens at once and every method does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        # Copies first: compute that fills the GPU would keep them from starting.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._before_ahead: torch.cuda.Event | None = None
        # External: a graph that waits for it waits for what was recorded last before its replay.
        self._ahead = torch.cuda.Event(external=True) if self._stream is not None else None

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Around one layer call: earlier compute, then its copies, then later compute.

        Earlier compute may still read what the copies overwrite. The order holds also where the
        call breaks off. What was copied ahead for another call is not waited for.
        """
        self.wait_for_compute()
        self._wait_for_ahead()
        self._before_ahead = None
        compute = None if self._stream is None else self._compute_stream()
        try:
            yield
        finally:
            if compute is not None:
                event = self._before_ahead or self.mark()
                self.compute_after(event)
                compute.wait_event(event)  # where the call ended under another stream

    @contextmanager
    def copying_ahead(self) -> Iterator[None]:
        """Inside, copies go to this lane for the next call: this one does not wait for them."""
        if self._before_ahead is None:
            self._before_ahead = self.mark()
        self.wait_for_compute()
        with self.copying():
            yield
        if self._ahead is not None:
            self._ahead.record(self._stream)

    def outlives(self, tensors: Sequence[torch.Tensor]) -> None:
        """Memory that copies of this lane may still write to when the tensors are dropped."""
        for tensor in tensors if self._stream is not None else []:
            tensor.record_stream(self._stream)

    def wait_for_compute(self) -> None:
        """Later copies start after all compute that is enqueued now."""
        if self._stream is not None:
            self._stream.wait_stream(self._compute_stream())

    def _wait_for_ahead(self) -> None:
        """In a graph: its copies come after those that an eager call made ahead and nobody used.

        Outside of graphs the lane's own order says so.
        """
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            self._stream.wait_event(self._ahead)

    def copying(self) -> AbstractContextManager[Any]:
        """Inside, copies go to this lane."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """An event after the copies enqueued so far, for `compute_after`."""
        return None if self._stream is None else self._stream.record_event()

    def compute_after(self, event: torch.cuda.Event | None) -> None:
        """Later compute starts after the event."""
        if event is not None:
            self._compute_stream().wait_event(event)

    def _compute_stream(self) -> torch.cuda.Stream:
        assert self._stream is not None
        return torch.cuda.current_stream(self._stream.device)


class StreamBanks:
    """Two banks shared by all layers of one layout: one is copied into while the other computes.

    One layer call at a time uses them: providers that share banks share the `turn` of the first.

    Args:
        layout: what a row holds.
        num_rows: rows of each bank.
        device: where the banks live.

    Attributes:
        buffers: uint8, one a bank.
        ledgers: int32 `[1 + num_rows]`, one a bank: which expert of which layer each row holds, for
            the kernels that fill them.
        tensors: named tuples of `[num_rows, *shape]` in them.
        lane: on which the banks are filled.
        turn: of the providers that share the banks.
    """

    def __init__(self, layout: ExpertLayout, num_rows: int, device: torch.device) -> None:
        self.layout = layout
        self.num_rows = num_rows
        self.lane = CopyLane(device)
        self.turn: Turn | None = None
        banks = [layout.allocate(num_rows, device) for _ in range(NUM_BANKS)]
        self.buffers = [buffer for buffer, _ in banks]
        self.tensors: list[Any] = [tensors for _, tensors in banks]
        self.ledgers = [torch.full((1 + num_rows,), -1, dtype=torch.int32) for _ in banks]
        for ledger in self.ledgers:
            ledger[0] = 0
        self.ledgers = [ledger.to(device) for ledger in self.ledgers]
        self.lane.outlives(self.buffers + self.ledgers)

    @property
    def nbytes(self) -> int:
        """Device bytes of both banks."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def fill(self, bank: int, store: ExpertStore, experts: Sequence[int]) -> None:
        """Copy experts into the first rows of a bank, on the current stream."""
        self.ledgers[bank][1:].fill_(-1)  # of kernels that fill it too
        for row, expert in enumerate(experts):
            store.copy_into(expert, [tensor[row] for tensor in self.tensors[bank]])
