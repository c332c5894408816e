"""Experts on disk: rows are read from a pack into a cache of rows in host memory when missed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait

import torch

from hotexperts.cache.host_memory import HostBuffer
from hotexperts.cache.pack_file import PackFile
from hotexperts.config import DEFAULT_RAM_POLICY
from hotexperts.policy import POLICIES
from hotexperts.residency import Residency
from hotexperts.stats import TierCounts
from hotexperts.types import Placement


class DiskBackingStore:
    """One layer's rows in a pack, the warmest of them in host memory as well.

    The rows in memory are a cache like the slots: a ledger says who is where, a policy of its own
    who leaves. Each layer has its own, as its policy's events are the layer's calls.

    Args:
        pack: the file.
        layer: which of its layers, from 0.
        num_rows: rows in host memory, 1 to E.
        policy: which of them leaves: a registered name or "module:Class".
        pin: page-lock the memory (needs CUDA).

    Attributes:
        layout: what a row holds.
        num_experts: rows in the pack.
        num_rows: rows in host memory.
        counts: of reads and of rows that needed none.

    Raises:
        HostMemoryError: the memory, or its page-locking, is refused.
        UnknownNameError: an unknown policy.
    """

    def __init__(
        self,
        pack: PackFile,
        layer: int,
        num_rows: int,
        *,
        policy: str = DEFAULT_RAM_POLICY,
        pin: bool = False,
    ) -> None:
        packed = pack.header.layers[layer]
        assert 1 <= num_rows <= packed.num_experts, (num_rows, packed)
        self.layout = packed.layout
        self.num_experts = packed.num_experts
        self.num_rows = num_rows
        self.counts = TierCounts()
        self.residency = Residency(self.num_experts, num_rows)
        self._policy = POLICIES.load(policy)(self.num_experts, num_rows)
        self._pack, self._layer, self._is_pinned = pack, layer, pin
        self._memory = HostBuffer(num_rows * packed.row_stride, pin=pin)
        rows = self._memory.bytes.view(num_rows, packed.row_stride)
        self._buffers = [memoryview(row.numpy()).cast("B") for row in rows]
        self._tensors = self.layout.views(rows[:, : self.layout.row_nbytes])
        self._sent: list[torch.cuda.Event | None] = [None] * num_rows
        self._expected: deque[int] = deque()
        self._ready: set[int] = set()  # of the event before, not yet copied: nobody takes their row
        self._arriving: dict[int, Future[None]] = {}

    @property
    def host_nbytes(self) -> int:
        """Bytes of the rows in memory."""
        return self._memory.bytes.numel()

    def expect(self, experts: Sequence[int]) -> None:
        """Begin to read these, as many at once as there is memory for; they are copied next.

        Args:
            experts: distinct, in the order in which they will be copied.
        """
        self._settle()
        self._expected = deque(experts)
        self._begin()

    @torch.no_grad()
    def copy_into(self, expert: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copy one row as soon as it is in memory; it is read now where nobody expected it.

        Raises:
            StorageError: the disk does not give it.
            CheckpointError: its bytes are not those that were written.
        """
        while expert not in self._ready:
            if expert not in self._expected:
                self._expected.appendleft(expert)
            self._begin()
        slot = self._arrived(expert)
        for target, source in zip(tensors, self._tensors, strict=True):
            target.copy_(source[slot], non_blocking=self._is_pinned)
        if tensors[0].is_cuda:
            event = self._sent[slot] = self._sent[slot] or torch.cuda.Event()
            event.record(torch.cuda.current_stream(tensors[0].device))
        self._ready.discard(expert)

    def reset_counts(self) -> None:
        """Set the counters to zero; the rows stay in memory."""
        self.counts = TierCounts()

    def reset(self) -> None:
        """Forget rows, history and counters, as after construction."""
        self._settle()
        self._expected.clear()
        self._ready.clear()
        self.residency.reset()
        self._policy.reset()
        self.reset_counts()

    def _begin(self) -> None:
        """One event of the policy: the next rows that are expected, as many as fit."""
        self._settle()
        self._ready.clear()
        count = min(len(self._expected), self.num_rows)
        chunk = [self._expected.popleft() for _ in range(count)]
        admitted: Sequence[int] = ()
        try:
            residency = self.residency
            decision = self._policy.decide(
                sorted(chunk), [1] * count, residency.residents, residency.num_free, max_bypassed=0
            )
            assert not decision.bypassed, decision
            admitted = decision.admitted
            placements = {place.expert: place for place in residency.apply(decision)}
            for expert in chunk:
                if expert in placements:
                    self._read(placements[expert])
        except BaseException:  # whoever has no read under way has no row
            self._pack.finish_reads()  # nor has one that nobody noted
            self.residency.recover(set(admitted) - set(self._arriving))
            raise
        self._ready = set(chunk)
        self.counts.ram_hits += count - len(placements)

    def _read(self, placement: Placement) -> None:
        sent = self._sent[placement.slot]
        if sent is not None:
            sent.synchronize()  # the device may still read what was there
        buffer = self._buffers[placement.slot]
        self._arriving[placement.expert] = self._pack.begin_read(
            self._layer, placement.expert, buffer
        )
        self.counts.disk_reads += 1
        self.counts.disk_bytes += len(buffer)

    def _arrived(self, expert: int) -> int:
        """Where the row is, once it is there."""
        under_way = self._arriving.get(expert)
        if under_way is not None:
            wait([under_way])
            self._finish(expert)
            fault = under_way.exception()
            if fault is not None:
                raise fault
        return self.residency.slot_of[expert]

    def _settle(self) -> None:
        """Wait for what a call that broke off had begun."""
        wait(self._arriving.values())
        for expert in list(self._arriving):
            self._finish(expert)

    def _finish(self, expert: int) -> None:
        """A row that came is there; one that did not is not."""
        if self._arriving[expert].exception() is not None:
            self._ready.discard(expert)
            self.residency.discard([expert])
        del self._arriving[expert]
