"""Copies beside compute: a copy stream, and the two banks through which a large call streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hotexperts.banks import NUM_BANKS, BankLedger
from hotexperts.cache.store import ExpertStore, expect
from hotexperts.cache.turn import Turn
from hotexperts.formats import ExpertLayout
from hotexperts.types import Placement


class CopyLane:
    """Side streams for copies, one a bank, ordered against the compute stream by events.

    Copies follow each other: two at once would share the link, and both be late. But who waits for
    one bank does not wait for what was copied ahead into the other. On a CPU everything happens at
    once and every method does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        num_streams = NUM_BANKS if device.type == "cuda" else 0
        # Copies first: compute that fills the GPU would keep them from starting.
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(num_streams)]
        self._last: torch.cuda.Event | None = None  # after this call's copies so far
        self._before_ahead: torch.cuda.Event | None = None
        if self._streams:
            # External: a graph that waits for it waits for what was recorded last before its
            # replay. It exists from now on, or a graph would not wait for it at all.
            self._ahead = torch.cuda.Event(external=True)
            self._ahead.record(self._streams[0])

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Around one layer call: earlier compute, then its copies, then later compute.

        Earlier compute may still read what the copies overwrite. The order holds also where the
        call breaks off. One that ends well does not wait for what it copied ahead for the next.
        """
        self._last = self._before_ahead = None
        compute = self._compute_stream() if self._streams else None
        try:
            yield
        except BaseException:
            # An interrupt may have kept copies from being noted in `_last`.
            if compute is not None and not torch.cuda.is_current_stream_capturing():
                for stream in self._streams:
                    compute.wait_stream(stream)
                    self._compute_stream().wait_stream(stream)
            raise
        finally:
            event = self._before_ahead or self._last
            self._last = self._before_ahead = None
            if compute is not None and event is not None:
                self.compute_after(event)
                compute.wait_event(event)  # where the call ended under another stream

    @contextmanager
    def copying(self, bank: int) -> Iterator[None]:
        """Inside, copies go to the bank: after compute so far, and after this call's copies."""
        if not self._streams:
            yield
            return
        stream = self._streams[bank]
        stream.wait_stream(self._compute_stream())
        if self._last is not None:
            stream.wait_event(self._last)
        elif torch.cuda.is_current_stream_capturing():
            # An eager call may have copied ahead and broken off; in eager order the bank's own
            # stream says so.
            stream.wait_event(self._ahead)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self._last = stream.record_event()

    @contextmanager
    def copying_ahead(self, bank: int) -> Iterator[None]:
        """Inside, copies go to the bank for the next call: this one does not wait for them.

        Not while a graph is captured, which must end with all of its branches joined.
        """
        if not self._streams:
            yield
            return
        self._before_ahead = self._before_ahead or self._last
        self._streams[bank].wait_event(self._ahead)
        try:
            with self.copying(bank):
                yield
        finally:
            self._ahead.record(self._streams[bank])

    def outlives(self, tensors: Sequence[torch.Tensor]) -> None:
        """Memory that copies of this lane may still use when the tensors are dropped."""
        for stream in self._streams:
            for tensor in tensors:
                tensor.record_stream(stream)

    def mark(self) -> torch.cuda.Event | None:
        """An event after this call's copies so far, for `compute_after`."""
        return self._last

    def compute_after(self, event: torch.cuda.Event | None) -> None:
        """Later compute starts after the event."""
        if event is not None:
            self._compute_stream().wait_event(event)

    def _compute_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._streams[0].device)


class StreamBanks:
    """Two banks shared by all layers of one layout: one is copied into while the other computes.

    One layer call at a time uses them: providers that share banks share the `turn` of the first.

    Args:
        layout: what a row holds.
        num_rows: rows of each bank.
        device: where the banks live.

    Attributes:
        buffers: uint8, one a bank.
        ledger: what the host knows to be in them.
        num_fills: int32, one a bank: how often kernels filled it, which the host may not know of.
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
        self.ledger = BankLedger(num_rows)
        self.num_fills = torch.zeros(NUM_BANKS, dtype=torch.int32, device=device)
        self._fills_known = [0] * NUM_BANKS
        self.lane.outlives([*self.buffers, self.num_fills])

    @property
    def nbytes(self) -> int:
        """Device bytes of both banks."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def fill(
        self, bank: int, layer: int, store: ExpertStore, placements: Sequence[Placement]
    ) -> None:
        """Copy experts of a layer into rows of a bank, on the current stream."""
        with self.ledger.copying(bank, layer, placements):
            expect(store, [expert for expert, _ in placements])
            for expert, row in placements:
                store.copy_into(expert, [tensor[row] for tensor in self.tensors[bank]])

    def fills_were(self, num_fills: Sequence[int]) -> None:
        """What `num_fills` said when the host last waited: a bank that changed is unknown."""
        for bank, (now, before) in enumerate(zip(num_fills, self._fills_known, strict=True)):
            if now != before:
                self.ledger.forget(bank)
        self._fills_known = list(num_fills)
