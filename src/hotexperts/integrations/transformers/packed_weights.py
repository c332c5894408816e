"""Weights that GPTQ, AWQ or compressed-tensors packed into words: what their numbers are.

A number is (code - zero point) times scale. Codes and zero points are without sign in the files,
and both are moved down by half of their range here, as codes with a sign lie in rows: where all of
a weight's zero points are in the middle, it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch

from hotexperts.errors import CheckpointError
from hotexperts.integrations.transformers.schemes import (
    AWQ,
    COMPRESSED,
    GPTQ,
    NAMES,
    NEEDED,
    Kind,
    Scheme,
)

_ROWS_AT_A_TIME = 4096  # for memory's sake: a head has a row for each token there is
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class PackedWeight:
    """One weight `[outputs, inputs]`, as several tensors of a checkpoint.

    Attributes:
        name: of the module that it belongs to.
        scheme: how it is packed.
        files: of its tensors, by their names after the module's.

    Raises:
        CheckpointError: a tensor is missing, or not of the dtype or shape that the others want.
    """

    name: str
    scheme: Scheme
    files: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._require(NEEDED[self.scheme.method])
        self._check_dtypes()
        self._require(("order",) if self.kind.has_order else ())
        for part, wanted in self._wanted_shapes().items():
            if self._has(part) and self._shape(part) != wanted:
                self._refuse(part, f"has shape {list(self._shape(part))}", f"{list(wanted)}")

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        if self.scheme.method == COMPRESSED:
            found = [int(size) for size in self._tensor("shape").flatten().tolist()]
            if len(found) != 2 or min(found) < 1:
                self._refuse("shape", f"is {found}", "outputs and inputs")
            return found[0], found[1]
        bits = self.scheme.kinds[0].bits
        rows, columns = self._matrix("codes")
        is_awq = self.scheme.method == AWQ
        return (columns * 32 // bits, rows) if is_awq else (columns, rows * 32 // bits)

    @cached_property
    def kind(self) -> Kind:
        """Its codes and groups, which are those of the scheme that its tensors' shapes fit."""
        outputs, inputs = self.shape
        num_scales = self._matrix("scales")[1 if self.scheme.method == COMPRESSED else 0]
        kinds = [k for k in self.scheme.kinds if k.num_groups(inputs) == num_scales]
        if not kinds:
            wanted = " or ".join(str(kind.num_groups(inputs)) for kind in self.scheme.kinds)
            self._refuse("scales", f"has {num_scales} scales an output", f"{wanted} of {inputs}")
        if self.scheme.method == COMPRESSED:
            columns = self._matrix("codes")[1]
            kinds = [kind for kind in kinds if -(-inputs * kind.bits // 32) == columns]
        if not kinds:
            bits = ", ".join(sorted({str(kind.bits) for kind in self.scheme.kinds}))
            came = f"has shape {list(self._shape('codes'))}"
            self._refuse("codes", came, f"{outputs} x {inputs} codes of {bits} bits")
        if len({(kind.bits, min(kind.group_size or inputs, inputs)) for kind in kinds}) > 1:
            self._refuse("scales", f"may be of several groups ({kinds})", "one")
        return kinds[0]

    @property
    def scale_dtype(self) -> Any:
        """In the file."""
        return self._dtype("scales")

    @property
    def group_size(self) -> int:
        """Inputs that share a scale, as long as they are in order."""
        return self.kind.group_size or self.shape[1]

    def codes(self) -> torch.Tensor:
        """Uint8 `[outputs, inputs]`, whose low bits are numbers with a sign."""
        method, bits, words = self.scheme.method, self.kind.bits, self._tensor("codes")
        if method == AWQ:
            found = _awq_columns(_in_words(words, bits)).T
        else:
            found = _in_words(words.T if method == GPTQ else words, bits)[:, : self.shape[1]]
        return (found ^ (1 << (bits - 1))).contiguous()

    def scales(self) -> torch.Tensor:
        """Float32 `[outputs, groups]`.

        Raises:
            CheckpointError: one is no number.
        """
        found = self._tensor("scales").float()
        if not bool(found.isfinite().all()):
            self._refuse("scales", "has values that are infinite or no numbers", "numbers")
        return found if self.scheme.method == COMPRESSED else found.T.contiguous()

    def zeros(self) -> torch.Tensor | None:
        """Int16 `[outputs, groups]`, to be taken from codes; None where all are 0."""
        if not self._has("zeros"):
            return None
        method, bits, words = self.scheme.method, self.kind.bits, self._tensor("zeros")
        if method == COMPRESSED:
            found = _in_words(words.T, bits)[:, : self.shape[0]].T
        else:
            found = _in_words(words, bits)
            if method == AWQ:
                found = _awq_columns(found)
            found = found[:, : self.shape[0]].T
        moved = found.short() + self.scheme.zero_shift - (1 << (bits - 1))
        return moved.contiguous() if bool(moved.any()) else None

    def order(self) -> torch.Tensor | None:
        """Each input's group, int64; None where they are in order.

        Raises:
            CheckpointError: a group that there is not.
        """
        if not self._has("order"):
            return None
        found = self._tensor("order").long()
        in_order = torch.arange(self.shape[1]) // self.group_size
        if torch.equal(found, in_order) or bool((found == -1).all()):
            return None
        most = self.kind.num_groups(self.shape[1]) - 1
        if int(found.min()) < 0 or int(found.max()) > most:
            self._refuse("order", f"has {int(found.min())} to {int(found.max())}", f"0 to {most}")
        return found

    def dequantised(self) -> torch.Tensor:
        """The numbers, float32 `[outputs, inputs]`, rounded once."""
        codes, order, zeros, scales = self.codes(), self.order(), self.zeros(), self.scales()
        if order is None:
            order = torch.arange(self.shape[1]) // self.group_size
        sign = 1 << (self.kind.bits - 1)
        found = torch.empty(self.shape)
        for first in range(0, len(found), _ROWS_AT_A_TIME):
            part = slice(first, first + _ROWS_AT_A_TIME)
            numbers = (codes[part] ^ sign).float() - sign
            if zeros is not None:
                numbers -= zeros[part].float()[:, order]
            torch.mul(numbers, scales[part][:, order], out=found[part])
        return found

    def release(self) -> None:
        """Hand its pages back."""
        for suffix, file in self.files.items():
            file.release(f"{self.name}.{suffix}")

    def _require(self, parts: Sequence[str]) -> None:
        for part in parts:
            if not self._has(part):
                there = ", ".join(sorted(self.files))
                raise CheckpointError(
                    f"{self.name}: the checkpoint has {there} of this weight, and no "
                    f"{self._suffix(part)}: it is incomplete, or not {self.scheme.method}"
                )

    def _check_dtypes(self) -> None:
        for part in ("codes", "zeros"):
            if self._has(part) and self._dtype(part) != torch.int32:
                self._refuse(part, f"is {_said(self._dtype(part))}", "int32")
        if self.scale_dtype not in _SCALES:
            wanted = ", ".join(map(_said, _SCALES))
            self._refuse("scales", f"is {_said(self.scale_dtype)}", f"one of {wanted}")

    def _wanted_shapes(self) -> dict[str, tuple[int, ...]]:
        outputs, inputs = self.shape
        bits, num_groups = self.kind.bits, self.kind.num_groups(inputs)
        words = -(-outputs * bits // 32)
        if self.scheme.method == COMPRESSED:
            found = {"scales": (outputs, num_groups), "zeros": (words, num_groups)}
            found["codes"] = (outputs, -(-inputs * bits // 32))
        else:
            found = {"scales": (num_groups, outputs), "zeros": (num_groups, words)}
        return {**found, "order": (inputs,)}

    def _matrix(self, part: str) -> tuple[int, int]:
        shape = self._shape(part)
        if len(shape) != 2 or min(shape) < 1:
            self._refuse(part, f"has shape {list(shape)}", "a matrix")
        return shape[0], shape[1]

    def _suffix(self, part: str) -> str:
        return NAMES[self.scheme.method].get(part, "")

    def _key(self, part: str) -> str:
        return f"{self.name}.{self._suffix(part)}"

    def _has(self, part: str) -> bool:
        return self._suffix(part) in self.files

    def _shape(self, part: str) -> tuple[int, ...]:
        return self.files[self._suffix(part)].entries[self._key(part)].shape

    def _dtype(self, part: str) -> Any:
        return self.files[self._suffix(part)].entries[self._key(part)].dtype

    def _tensor(self, part: str) -> torch.Tensor:
        return self.files[self._suffix(part)].tensor(self._key(part))

    def _refuse(self, part: str, came: str, wanted: str) -> NoReturn:
        raise CheckpointError(
            f"{self._key(part)} {came}, wanted is {wanted}: the checkpoint is corrupt, or not as "
            "its quantization_config says"
        )


def _in_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of int32 `[rows, words]`, the low bits first: uint8 `[rows, codes]`."""
    found = words.flatten().view(torch.uint8).view(len(words), -1)
    if bits == 4:
        found = torch.stack([found & 0xF, found >> 4], dim=-1).flatten(-2)
    return found


def _awq_columns(found: torch.Tensor) -> torch.Tensor:
    """Codes in the order of columns: a word has four even ones of eight, then the odd ones."""
    return found.unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3)


def _said(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
