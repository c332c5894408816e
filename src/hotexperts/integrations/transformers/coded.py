"""Experts that a checkpoint keeps in fp8 or mxfp4: their codes and scales, as rows take them.

The numbers are those that Transformers' own dequantisation makes, bit for bit; what it would
dequantise in another way than is known here stays with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotexperts.cache.quantised import SLOT_DTYPES, Coded, Packings, pays
from hotexperts.formats import ExpertLayout, TensorSpec
from hotexperts.integrations.transformers import compat
from hotexperts.integrations.transformers.sources import ParameterSources, Source, view
from hotexperts.kernels.gather.codes import CODE_NAMES, E2M1, E4M3, exponents
from hotexperts.kernels.gather.scaled import Scaled, power_of_two_in

MXFP4_GROUP = 32
_SCALE_BITS = {torch.bfloat16: 16, torch.uint8: 8, torch.float8_e8m0fnu: 8}
_SCALES = (torch.float32, torch.float16, *_SCALE_BITS)


@dataclass(frozen=True, slots=True)
class CodedParameter:
    """One parameter of a layer.

    Attributes:
        packing: how it lies in a row.
        read: gives an expert's codes and scales.
    """

    packing: Scaled
    read: Callable[[int], Coded]


@dataclass(frozen=True, slots=True)
class CodedExperts:
    """One layer's experts: a `CodedSource`.

    Attributes:
        layout: of a slot.
        num_experts: of the layer.
        parameters: in layout order; those that are plain as a function of the expert.
        release: hands back the pages of an expert that was read.
    """

    layout: ExpertLayout
    num_experts: int
    parameters: tuple[CodedParameter | Callable[[int], torch.Tensor], ...]
    release: Callable[[int], None]

    @property
    def kind(self) -> str:
        """Of the codes."""
        codes = {p.packing.code for p in self.parameters if isinstance(p, CodedParameter)}
        return " and ".join(CODE_NAMES[code] for code in sorted(codes))

    @property
    def packings(self) -> Packings:
        """How each tensor lies in a row."""
        return tuple(p.packing if isinstance(p, CodedParameter) else None for p in self.parameters)

    def read(self, expert: int) -> Sequence[torch.Tensor | Coded]:
        """Each tensor `[1, *shape]`, or its codes and scales."""
        found = [
            p.read(expert) if isinstance(p, CodedParameter) else p(expert) for p in self.parameters
        ]
        return found


def coded_parameter(spec: TensorSpec, entry: ParameterSources) -> CodedParameter | None:
    """A parameter's codes, or None where the checkpoint has none that are known here."""
    operations = [] if entry.converter is None else entry.converter.operations
    if not operations or len(spec.shape) != 2 or spec.dtype not in SLOT_DTYPES:
        return None
    found = None
    if type(operations[0]).__name__ == compat.FP8_OPERATION and compat.only_stacks(operations[1:]):
        found = _fp8(spec, entry)
    elif [type(op).__name__ for op in operations] == [compat.MXFP4_OPERATION]:
        found = _mxfp4(spec, entry)
    if found is None or not found.packing.is_possible or not pays(found.packing, spec):
        return None
    return found


def _mxfp4(spec: TensorSpec, entry: ParameterSources) -> CodedParameter | None:
    """`[E, out, groups, 16]` bytes and `[E, out, groups]` exponents; the slot has it turned."""
    blocks = entry.by_pattern.get(f"{spec.name}_blocks")
    stored = entry.by_pattern.get(f"{spec.name}_scales")
    if blocks is None or stored is None:
        return None
    if _dtype(blocks) != torch.uint8 or _dtype(stored) != torch.uint8:
        return None
    rows, columns = spec.shape
    groups = rows // MXFP4_GROUP
    if _shape(blocks)[1:] != (columns, groups, MXFP4_GROUP // 2) or rows % MXFP4_GROUP:
        return None
    if _shape(stored)[1:] != (columns, groups):
        return None

    def read(expert: int) -> Coded:
        codes = _halves(view(blocks, expert)[0].flatten(1)).T
        scales = exponents(view(stored, expert)[0]).T
        return codes.unsqueeze(0), scales.unsqueeze(0)

    return CodedParameter(Scaled(E2M1, rows, columns, MXFP4_GROUP, 1, 8, spec.dtype), read)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a matrix that are a tensor of their own in the checkpoint."""

    weight: list[Source]
    scale: list[Source]
    code: int
    shape: tuple[int, int]
    grid: tuple[int, int]

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        return self.shape[0] // self.grid[0], self.shape[1] // self.grid[1]

    def read(self, expert: int, group: tuple[int, int]) -> Coded:
        """Codes `[rows, columns]`, and a scale for every group."""
        codes = view(self.weight, expert)[0].view(torch.uint8)
        scales = view(self.scale, expert)[0].reshape(self.grid)
        is_exponent = scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
        numbers = exponents(scales.view(torch.uint8)) if is_exponent else scales.float()
        for dim in range(2):
            numbers = numbers.repeat_interleave(self.block[dim] // group[dim], dim)
        return _halves(codes) if self.code == E2M1 else codes, numbers


def _fp8(spec: TensorSpec, entry: ParameterSources) -> CodedParameter | None:
    """A matrix, or gate above up, each with a grid of scales."""
    named = {pattern.removesuffix("$"): found for pattern, found in entry.by_pattern.items()}
    order = [pattern.removesuffix("$") for pattern in entry.converter.source_patterns]
    pieces = [
        _piece(named[name], named.get(f"{name}_scale_inv"))
        for name in order
        if name in named and not name.endswith(("_scale_inv", "activation_scale"))
    ]
    sound = [piece for piece in pieces if piece is not None]
    if not sound or len(sound) < len(pieces) or len({piece.code for piece in sound}) > 1:
        return None
    rows, columns = sum(piece.shape[0] for piece in sound), sound[0].shape[1]
    if (rows, columns) != spec.shape or any(piece.shape[1] != columns for piece in sound):
        return None
    shared = [math.gcd(*(piece.block[dim] for piece in sound)) for dim in range(2)]
    group = power_of_two_in(shared[0]), power_of_two_in(shared[1])
    bits = max(_SCALE_BITS.get(_dtype(piece.scale), 32) for piece in sound)

    def read(expert: int) -> Coded:
        parts = [piece.read(expert, group) for piece in sound]
        codes, scales = (torch.cat(of_all).unsqueeze(0) for of_all in zip(*parts, strict=True))
        return codes, scales

    return CodedParameter(Scaled(sound[0].code, rows, columns, *group, bits, spec.dtype), read)


def _piece(weight: list[Source], scale: list[Source] | None) -> _Piece | None:
    # As in Transformers, int8 is two numbers of e2m1.
    code = {torch.float8_e4m3fn: E4M3, torch.int8: E2M1}.get(_dtype(weight))
    if scale is None or code is None or _dtype(scale) not in _SCALES:
        return None
    shape = _shape_of_one(weight)
    grid = _shape_of_one(scale)
    if math.prod(grid) == 1:
        grid = (1, 1)
    if len(shape) != 2 or len(grid) != 2:
        return None
    rows, columns = shape[0], shape[1] * (2 if code == E2M1 else 1)
    if not rows or not columns or rows % grid[0] or columns % grid[1]:
        return None
    return _Piece(weight, scale, code, (rows, columns), (grid[0], grid[1]))


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the low half first, as a byte each; uint8 `[rows, 2 * bytes]`."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def _dtype(sources: list[Source]) -> Any:
    """Of every expert's tensor; None where they differ."""
    found = {source.dtype for source in sources}
    return found.pop() if len(found) == 1 else None


def _shape(sources: list[Source]) -> tuple[int, ...]:
    return sources[0].file.entries[sources[0].key].shape


def _shape_of_one(sources: list[Source]) -> tuple[int, ...]:
    """Of one expert's tensor."""
    shape = _shape(sources)
    return shape if sources[0].expert is not None else shape[1:]
