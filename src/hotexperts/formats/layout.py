"""The row: all tensors of one expert back to back, each beginning at a 256-byte boundary."""

from __future__ import annotations

import keyword
import math
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hotexperts.errors import UnsupportedModelError

ROW_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an expert.

    Attributes:
        name: the engine's name for it ("gate_up_proj"), a Python identifier.
        shape: of one expert, without the expert dimension; () for one number an expert.
        dtype: any torch dtype of at least one byte.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ExpertLayout:
    """Names, shapes, dtypes and offsets of an expert's tensors.

    Attributes:
        specs: the tensors in row order.
        offsets: bytes from the row's start to each tensor, multiples of 256.
        row_nbytes: bytes of a row, a multiple of 256.
        group: makes the named tuple that carries one tensor a name.
    """

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...] = field(init=False)
    row_nbytes: int = field(init=False)
    group: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.specs]
        if not names:
            raise UnsupportedModelError("an expert without tensors: give at least one")
        for name in names:
            if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
                raise UnsupportedModelError(
                    f"tensor name {name!r} is not a public identifier: name it as an attribute"
                )
        offsets, end = [], 0
        for spec in self.specs:
            offsets.append(end)
            end += _aligned(spec.nbytes)
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "row_nbytes", end)
        object.__setattr__(self, "group", namedtuple("ExpertTensors", names))

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> tuple[ExpertLayout, int]:
        """The layout of stacked tensors `[E, ...]`, and E.

        Raises:
            UnsupportedModelError: a tensor has no expert dimension, or they disagree on E.
        """
        for name, tensor in tensors.items():
            if tensor.dim() == 0:
                raise UnsupportedModelError(
                    f"tensor {name!r} has no expert dimension: leave it out, for a value that all "
                    "experts share stays with the model"
                )
        sizes = {name: tensor.shape[0] for name, tensor in tensors.items()}
        if len(set(sizes.values())) > 1:
            raise UnsupportedModelError(
                f"the first dimension must be the expert, but the sizes differ: {sizes}: "
                "make it so in each"
            )
        specs = [TensorSpec(n, tuple(t.shape[1:]), t.dtype) for n, t in tensors.items()]
        return cls(tuple(specs)), next(iter(sizes.values()), 0)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names in row order."""
        return tuple(spec.name for spec in self.specs)

    @property
    def nbytes(self) -> int:
        """Bytes of one expert, without padding."""
        return sum(spec.nbytes for spec in self.specs)

    def allocate(self, num_rows: int, device: torch.device) -> tuple[torch.Tensor, Any]:
        """Fresh slots: contiguous tensors `[num_rows, *shape]` in one buffer, uninitialised.

        Returns:
            The buffer, uint8, in which each tensor begins at a 256-byte boundary, and the tensors,
            one a name.
        """
        starts, end = [], 0
        for spec in self.specs:
            starts.append(end)
            end += _aligned(num_rows * spec.nbytes)
        buffer = torch.empty(end, dtype=torch.uint8, device=device)
        tensors = (
            buffer[start : start + num_rows * spec.nbytes].view(spec.dtype)
            for spec, start in zip(self.specs, starts, strict=True)
        )
        shaped = (t.view(num_rows, *s.shape) for t, s in zip(tensors, self.specs, strict=True))
        return buffer, self.group(*shaped)

    def views(self, rows: torch.Tensor) -> Any:
        """Typed views `[num_rows, *shape]` into `rows`, uint8 `[num_rows, row_nbytes]`."""
        assert rows.dtype == torch.uint8
        assert rows.shape[1:] == (self.row_nbytes,), rows.shape
        return self.group(
            *(self._view(rows, s, o) for s, o in zip(self.specs, self.offsets, strict=True))
        )

    @staticmethod
    def _view(rows: torch.Tensor, spec: TensorSpec, offset: int) -> torch.Tensor:
        part = rows[:, offset : offset + spec.nbytes]
        return part.view(spec.dtype).view(rows.shape[0], *spec.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES
