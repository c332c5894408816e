"""A store that leaves the experts in their file: nothing is copied until an expert is missed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hotexperts.cache.host_memory import HostBuffer
from hotexperts.errors import CheckpointError
from hotexperts.formats import ExpertLayout

ReadExpert = Callable[[int], Sequence[Sequence[torch.Tensor]]]
_NUM_BOUNCE_ROWS = 2


class FileStore:
    """Rows assembled on demand from memory-mapped tensors.

    Args:
        layout: what a row holds.
        num_experts: experts in the layer.
        read_expert: for one expert, in layout order, the pieces of each tensor; the pieces are
            concatenated along their first dimension and converted to the layout's dtype. Views of
            a mapped file cost no memory.
        release: called with the expert after its row was copied; may drop pages.
        bounce: page-locked rows to copy through, on CUDA.
    """

    host_nbytes = 0

    def __init__(
        self,
        layout: ExpertLayout,
        num_experts: int,
        read_expert: ReadExpert,
        *,
        release: Callable[[int], None] = lambda expert: None,
        bounce: PinnedBounce | None = None,
    ) -> None:
        self.layout = layout
        self.num_experts = num_experts
        self._read_expert = read_expert
        self._release = release
        self._bounce = bounce

    @torch.no_grad()
    def copy_into(self, expert: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copy one row, through a page-locked row where the target is on CUDA.

        Raises:
            CheckpointError: the file's tensors do not have the layout's shape.
        """
        if tensors[0].is_cuda and self._bounce is not None:
            row = self._bounce.next_row(self.layout)
            self._assemble(expert, row)
            self._bounce.send(row, tensors)
        else:
            self._assemble(expert, tensors)
        self._release(expert)

    def check(self, expert: int) -> None:
        """Read one expert without copying it.

        Raises:
            CheckpointError: the file's tensors do not have the layout's shape.
        """
        self._read(expert)

    def _assemble(self, expert: int, tensors: Sequence[torch.Tensor]) -> None:
        for target, pieces in zip(tensors, self._read(expert), strict=True):
            begin = 0
            for piece in pieces:
                part = target[begin : begin + _length(piece)] if target.dim() else target
                part.copy_(piece if target.dim() else piece.reshape(()))
                begin += _length(piece)

    def _read(self, expert: int) -> Sequence[Sequence[torch.Tensor]]:
        pieces_of_all = self._read_expert(expert)
        for spec, pieces in zip(self.layout.specs, pieces_of_all, strict=True):
            shapes = [tuple(piece.shape) or (1,) for piece in pieces]
            wanted = spec.shape or (1,)
            whole = (sum(shape[0] for shape in shapes), *wanted[1:])
            if whole != wanted or any(shape[1:] != wanted[1:] for shape in shapes):
                raise CheckpointError(
                    f"expert {expert}, tensor {spec.name!r}: the file has "
                    f"{[list(shape) for shape in shapes]}, the model wants {list(spec.shape)}: "
                    "download the checkpoint again, or give the folder of this model"
                )
        return pieces_of_all


def _length(piece: torch.Tensor) -> int:
    return piece.shape[0] if piece.dim() else 1


class PinnedBounce:
    """Two page-locked rows in turn: one is filled while the other is on its way.

    Args:
        row_nbytes: the largest row of the stores that share it.
    """

    def __init__(self, row_nbytes: int) -> None:
        self._buffer = HostBuffer(_NUM_BOUNCE_ROWS * row_nbytes, pin=True)
        self._rows = self._buffer.bytes.view(_NUM_BOUNCE_ROWS, row_nbytes)
        self._sent = [torch.cuda.Event() for _ in range(_NUM_BOUNCE_ROWS)]
        self._turn = 0

    def next_row(self, layout: ExpertLayout) -> list[torch.Tensor]:
        """Typed views of a row that nothing on the device still reads."""
        self._turn = (self._turn + 1) % _NUM_BOUNCE_ROWS
        self._sent[self._turn].synchronize()
        rows = self._rows[self._turn : self._turn + 1, : layout.row_nbytes]
        return [tensor[0] for tensor in layout.views(rows)]

    def send(self, row: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Enqueue the copies of the row that `next_row` gave last."""
        for target, source in zip(tensors, row, strict=True):
            target.copy_(source, non_blocking=True)
        self._sent[self._turn].record(torch.cuda.current_stream(tensors[0].device))
