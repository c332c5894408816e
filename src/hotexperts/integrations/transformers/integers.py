"""Experts in int4 and int8 of a checkpoint: codes and scales, as rows take them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from hotexperts.cache.quantised import SLOT_DTYPES, Coded, pays
from hotexperts.errors import CheckpointError
from hotexperts.formats import TensorSpec
from hotexperts.integrations.transformers.coded import CodedParameter
from hotexperts.integrations.transformers.gguf_weights import GgufFile
from hotexperts.integrations.transformers.plain_view import PackedFile
from hotexperts.integrations.transformers.schemes import Kind
from hotexperts.integrations.transformers.sources import Source
from hotexperts.kernels.gather.codes import INT4, INT8
from hotexperts.kernels.gather.scaled import MOST_COLUMNS, Scaled, by_row, power_of_two_in


class IntegerWeight(Protocol):
    """A matrix `[outputs, inputs]` of codes with scales: `PackedWeight`, `GgufCodes`."""

    @property
    def name(self) -> str:
        """Its name without ".weight"."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        ...

    @property
    def kind(self) -> Kind:
        """Of its codes."""
        ...

    @property
    def scale_dtype(self) -> Any:
        """In the file."""
        ...

    @property
    def group_size(self) -> int:
        """Inputs that share a scale, as long as they are in order."""
        ...

    def codes(self) -> torch.Tensor:
        """Uint8 `[outputs, inputs]`, whose low bits are numbers with a sign."""
        ...

    def scales(self) -> torch.Tensor:
        """Float32 `[outputs, groups]`."""
        ...

    def zeros(self) -> torch.Tensor | None:
        """Int16 `[outputs, groups]`, to be taken from codes; None where all are 0."""
        ...

    def order(self) -> torch.Tensor | None:
        """Each input's group, int64; None where they are in order."""
        ...


def integer_parameter(
    spec: TensorSpec, pieces: Sequence[Sequence[Source]] | None
) -> CodedParameter | None:
    """A parameter's codes, as they are packed.

    Args:
        spec: of a slot.
        pieces: of each part that is a tensor of its own, such as gate and up, the experts'
            tensors; None where a parameter is not only joined from them.

    Returns:
        None where they are not packed, or rows cannot hold them: those are dequantised while they
        are read. That is so where inputs are in an order of their own (GPTQ's `desc_act`), where
        zero points have scales of 32 bits, and where experts or parts have codes of several sizes.

    Raises:
        CheckpointError: shapes that are not the model's, or scales that are no numbers.
    """
    packed = [[_packed(source) for source in sources] for sources in pieces or ()]
    weights = [[weight for weight in part if weight is not None] for part in packed]
    if not any(weights):
        return None
    _check_shapes(spec, weights)
    every = [weight for part in weights for weight in part]
    is_partly = sum(map(len, packed)) > len(every) or len({w.kind.bits for w in every}) > 1
    if is_partly or len(spec.shape) != 2 or spec.dtype not in SLOT_DTYPES:
        return None
    packing = _packing(spec, every)
    if packing is None or not pays(packing, spec):
        return None

    def read(expert: int) -> Coded:
        parts = [_coded(part[expert], packing) for part in weights]
        return tuple(torch.cat(of_all).unsqueeze(0) for of_all in zip(*parts, strict=True))

    return CodedParameter(packing, read)


def _packed(source: Source) -> IntegerWeight | None:
    return source.file.weight if isinstance(source.file, PackedFile | GgufFile) else None


def _check_shapes(spec: TensorSpec, weights: Sequence[Sequence[IntegerWeight]]) -> None:
    """The experts of a part are alike already: `ParameterSources.check`."""
    shapes = [part[0].shape for part in weights if part]
    rows = sum(shape[0] for shape in shapes)
    if len(shapes) == len(weights) and any((rows, shape[1]) != spec.shape for shape in shapes):
        names = ", ".join(f"{part[0].name}.weight" for part in weights)
        raise CheckpointError(
            f"{names}: packed are {' and '.join(str(list(shape)) for shape in shapes)}, the model "
            f"wants {list(spec.shape)} of {spec.name}: the checkpoint is of another model"
        )


def _packing(spec: TensorSpec, weights: Sequence[IntegerWeight]) -> Scaled | None:
    """How rows hold them, of whom none may be an exception."""
    if any(weight.order() is not None for weight in weights):
        return None
    dtypes = {weight.scale_dtype for weight in weights}
    bits = 16 if len(dtypes) == 1 and torch.float32 not in dtypes else 32
    has_zeros = any(weight.zeros() is not None for weight in weights)
    if has_zeros and bits == 32:
        return None
    group = power_of_two_in(math.gcd(*(weight.group_size for weight in weights)))
    code = INT4 if weights[0].kind.bits == 4 else INT8
    # No wider than a tile, which has scales of its own: so tiles are stretches of a slot.
    found = by_row(code, spec.shape, min(group, MOST_COLUMNS), bits, spec.dtype)
    if found is None:
        return None
    is_half = bits == 16 and dtypes == {torch.float16}
    return replace(found, has_half_scales=is_half, has_zeros=has_zeros)


def _coded(weight: IntegerWeight, packing: Scaled) -> tuple[torch.Tensor, ...]:
    """Codes, and scales and zero points, in the packing's rows, of which each is a group."""
    group = torch.arange(0, weight.shape[1], packing.columns) // weight.group_size
    scales, zeros = weight.scales(), weight.zeros()
    if zeros is None:
        zeros = torch.zeros(scales.shape, dtype=torch.int16)
    found = [weight.codes().view(-1, packing.columns), scales[:, group].view(-1, 1)]
    if packing.has_zeros:
        found.append(zeros[:, group].view(-1, 1))
    return tuple(found)
