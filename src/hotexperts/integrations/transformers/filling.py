"""Rows in host memory filled from a checkpoint's files, and how far that has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hotexperts.cache import CPUBackingStore
from hotexperts.cache.parallel_read import ParallelReader
from hotexperts.integrations.transformers.checkpoint import ExpertCheckpoint
from hotexperts.integrations.transformers.coded import CodedExperts
from hotexperts.integrations.transformers.modules import ExpertsModule

if TYPE_CHECKING:
    from hotexperts.integrations.transformers.load import Progress


class Filling:
    """Fills stores from a checkpoint, and says how far it has come.

    Args:
        checkpoint: where the experts are.
        reader: reads what can be read as it is.
        progress: called with (bytes read, bytes in all).
        total: bytes of all experts.
    """

    def __init__(
        self,
        checkpoint: ExpertCheckpoint,
        reader: ParallelReader,
        progress: Progress,
        total: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._reader = reader
        self._progress = progress
        self._total = total
        self._done = 0

    def fill(self, layer: ExpertsModule, store: CPUBackingStore) -> None:
        """Read a layer's rows; those that are read as they are may still be on their way."""
        source = self._checkpoint.store(layer, release_pages=True)
        spans = self._checkpoint.spans(layer, store.rows)
        if spans is not None:
            self._reader.submit(spans)
            self._advance(self._reader.take_done())
            return
        for expert in range(layer.num_experts):
            source.copy_into(expert, store.row(expert))
            self._advance(layer.layout.nbytes)

    def after_each(self, codes: CodedExperts) -> Callable[[int], None]:
        """What to call with each expert of a layer that is read in codes."""

        def read(expert: int) -> None:
            codes.release(expert)
            self._advance(codes.layout.nbytes)

        return read

    def finish(self) -> None:
        """Wait for what is on its way."""
        while self._reader.has_pending:
            self._advance(self._reader.take_done(waits=True))

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if num_bytes:
            self._progress(self._done, self._total)
