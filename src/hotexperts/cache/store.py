"""Stores: where every expert's row lives when it is not in a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from hotexperts.cache.file_store import PinnedBounce
from hotexperts.cache.host_memory import HostBuffer
from hotexperts.cache.page_lock import Held
from hotexperts.errors import UnsupportedModelError
from hotexperts.formats import ExpertLayout
from hotexperts.formats.layout import ROW_ALIGNMENT_BYTES
from hotexperts.kernels.gather.packing import Packing
from hotexperts.stats import TierCounts

CHUNK_NBYTES = 1 << 28  # of device memory beside the tensors, while they are taken


@dataclass(frozen=True, slots=True)
class RowForm:
    """How a row lies in a store.

    Attributes:
        offsets: bytes from the row's start to each tensor, multiples of 256.
        sizes: bytes of each tensor in the row, without padding.
        row_nbytes: bytes of a row, a multiple of 256.
        packings: of each tensor; None where it lies as it is.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    row_nbytes: int
    packings: tuple[Packing | None, ...]

    @classmethod
    def plain(cls, layout: ExpertLayout) -> RowForm:
        """Every tensor as it is."""
        sizes = tuple(spec.nbytes for spec in layout.specs)
        return cls(layout.offsets, sizes, layout.row_nbytes, (None,) * len(sizes))

    @classmethod
    def packed(cls, layout: ExpertLayout, packings: Sequence[Packing | None]) -> RowForm:
        """Each tensor in its packing, or as it is."""
        sizes = [
            spec.nbytes if packing is None else 4 * packing.num_words(spec.nbytes // 2)
            for spec, packing in zip(layout.specs, packings, strict=True)
        ]
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES
        return cls(tuple(offsets), tuple(sizes), end, tuple(packings))

    @property
    def nbytes(self) -> int:
        """Bytes of a row that are copied."""
        return sum(self.sizes)

    @property
    def is_packed(self) -> bool:
        """Whether a tensor lies otherwise than in a slot: no plain copy will do."""
        return any(packing is not None for packing in self.packings)

    def parts(self, row: torch.Tensor) -> Iterator[tuple[Packing | None, torch.Tensor]]:
        """Each tensor's packing and its bytes in a row, uint8 `[row_nbytes]`."""
        for offset, size, packing in zip(self.offsets, self.sizes, self.packings, strict=True):
            yield packing, row[offset : offset + size]


class ExpertStore(Protocol):
    """Holds the rows of one layer's experts; reads them, never writes them after loading."""

    layout: ExpertLayout
    num_experts: int

    @property
    def host_nbytes(self) -> int:
        """Host memory that the store itself holds (a mapped file counts nothing)."""
        ...

    def copy_into(self, expert: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copy one row into tensors of the layout's shapes, in stream order.

        On CUDA the copies are enqueued on the current stream and may still run on return.
        """
        ...


@runtime_checkable
class TieredStore(Protocol):
    """What a store has besides where its rows come from a slower place, and it keeps some."""

    counts: TierCounts

    def expect(self, experts: Sequence[int]) -> None:
        """Begin to bring these rows, distinct ones, which are copied next and in this order."""
        ...

    def reset_counts(self) -> None:
        """Set the counters to zero."""
        ...

    def reset(self) -> None:
        """Forget rows, history and counters."""
        ...


def expect(store: ExpertStore, experts: Sequence[int]) -> None:
    """Say which rows are copied next, in order, to a store that has to bring them first."""
    begin = getattr(store, "expect", None)  # a protocol's isinstance takes 20 us, in every call
    if experts and begin is not None:
        begin(experts)


class CPUBackingStore:
    """Every row in host memory: uint8 `[E, row_nbytes]`, page-locked where a GPU reads it.

    Args:
        layout: what a row holds.
        num_experts: rows, at least 1.
        pin: page-lock the memory (needs CUDA).
        steps_back: see `HostBuffer`.

    Attributes:
        buffer: the memory that the rows are in.
        bounce: page-locked rows to copy through where these are not; see `held.settle`.
        rows: the bytes.
        form: how a row lies in them.
        tensors: named tuple of typed views `[E, *shape]` into `rows`.

    Raises:
        HostMemoryError: the memory, or its page-locking, is refused.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        num_experts: int,
        *,
        pin: bool = False,
        steps_back: bool = False,
    ) -> None:
        check_not_empty(layout, num_experts)
        self.layout = layout
        self.form = RowForm.plain(layout)
        self.num_experts = num_experts
        nbytes = num_experts * layout.row_nbytes
        self.buffer = HostBuffer(nbytes, pin=pin, steps_back=steps_back)
        self.bounce: PinnedBounce | None = None
        self.rows = self.buffer.bytes.view(num_experts, layout.row_nbytes)
        self.tensors: Any = layout.views(self.rows)

    @classmethod
    @torch.no_grad()
    def from_tensors(
        cls,
        tensors: Mapping[str, torch.Tensor],
        *,
        pin: bool = False,
        steps_back: bool = False,
    ) -> CPUBackingStore:
        """Copy stacked tensors `[E, *shape]`, of any device, into a new store.

        Raises:
            UnsupportedModelError: a tensor without an expert dimension, or sizes that differ.
        """
        layout, num_experts = ExpertLayout.of(tensors)
        store = cls(layout, num_experts, pin=pin, steps_back=steps_back)
        device = next(iter(tensors.values())).device
        step = num_experts if device.type == "cpu" else max(1, CHUNK_NBYTES // layout.row_nbytes)
        for first in range(0, num_experts, step):
            part = {name: tensor[first : first + step] for name, tensor in tensors.items()}
            rows = store.rows[first : first + step]
            # Laid out on the device and brought over in one piece: a row of one tensor at a time
            # would cross the link in small copies through pageable memory.
            laid_out = rows if device.type == "cpu" else torch.zeros_like(rows, device=device)
            lay_out(layout, part, laid_out)
            if laid_out is not rows:
                rows.copy_(laid_out)
        return store

    @classmethod
    def from_store(
        cls,
        source: ExpertStore,
        *,
        pin: bool = False,
        after_each: Callable[[int], None] = lambda expert: None,
    ) -> CPUBackingStore:
        """Copy every row of another store; `after_each(expert)` reports progress."""
        store = cls(source.layout, source.num_experts, pin=pin)
        for expert in range(source.num_experts):
            source.copy_into(expert, store.row(expert))
            after_each(expert)
        return store

    @property
    def host_nbytes(self) -> int:
        """Bytes of `rows`."""
        return self.rows.numel()

    @property
    def is_pinned(self) -> bool:
        """Whether the GPU reads the rows itself."""
        return self.buffer.held is Held.PAGE_LOCKED

    def row(self, expert: int) -> list[torch.Tensor]:
        """Typed views of one row."""
        return [tensor[expert] for tensor in self.tensors]

    @torch.no_grad()
    def copy_into(self, expert: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copy one row, asynchronously where the store, or its bounce, is page-locked."""
        if self.bounce is not None and tensors[0].is_cuda:
            row = self.bounce.next_row(self.layout)
            for target, source in zip(row, self.row(expert), strict=True):
                target.copy_(source)
            self.bounce.send(row, tensors)
            return
        for target, source in zip(tensors, self.tensors, strict=True):
            target.copy_(source[expert], non_blocking=self.is_pinned)


def check_not_empty(layout: ExpertLayout, num_experts: int) -> None:
    """Refuse what no store can hold.

    Raises:
        UnsupportedModelError: no experts, or experts of no bytes.
    """
    if num_experts < 1 or layout.row_nbytes < 1:
        raise UnsupportedModelError(
            f"{num_experts} experts of {layout.row_nbytes} bytes are nothing to store: give "
            "a model that has some"
        )


def lay_out(layout: ExpertLayout, tensors: Mapping[str, torch.Tensor], rows: torch.Tensor) -> None:
    """Copy stacked tensors `[n, *shape]` into rows, uint8 `[n, row_nbytes]`, of the same device."""
    views = layout.views(rows)
    for name, tensor in tensors.items():
        getattr(views, name).copy_(tensor.detach())
