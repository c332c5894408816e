"""Weights of a GGUF file: plain ones as they lie, quantised ones as codes or as their numbers.

Q8_0 and Q4_0 are codes with an fp16 scale for every 32 inputs, as rows take them. Whatever else is
quantised becomes its numbers by the `gguf` package, one weight at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotexperts.cache.mapped_file import MappedFile
from hotexperts.cache.safetensors_file import TensorEntry
from hotexperts.errors import CheckpointError
from hotexperts.integrations.transformers.schemes import Kind

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_GROUP = 32
_CODE_BITS = {"Q8_0": 8, "Q4_0": 4}
_SCALE_NBYTES = 2  # at the begin of a block, before its codes


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file.

    Attributes:
        file: that has it.
        name: in the file.
        kind: `gguf.GGMLQuantizationType`.
        shape: as torch has it, rows last.
        begin: of its bytes in the file.
        end: of its bytes in the file.
    """

    file: MappedFile
    name: str
    kind: Any
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def is_plain(self) -> bool:
        """Whether its numbers are torch's."""
        return self.kind.name in PLAIN

    def first(self, index: int) -> GgufTensor:
        """What stands at an index of its first dimension."""
        nbytes = (self.end - self.begin) // self.shape[0]
        begin = self.begin + index * nbytes
        return GgufTensor(self.file, self.name, self.kind, self.shape[1:], begin, begin + nbytes)

    def tensor(self) -> torch.Tensor:
        """A view of plain numbers; else float32."""
        if self.is_plain:
            return self.file.view(self.begin, self.end, PLAIN[self.kind.name]).view(self.shape)
        from gguf import dequantize

        rows = self.file.view(self.begin, self.end, torch.uint8).view(
            math.prod(self.shape[:-1]), -1
        )
        return torch.from_numpy(dequantize(rows.numpy(), self.kind)).view(self.shape)


@dataclass(frozen=True, slots=True)
class GgufCodes:
    """A matrix `[outputs, inputs]` of Q8_0 or Q4_0: see `integers.IntegerWeight`.

    Attributes:
        name: in messages.
        source: the matrix.
    """

    name: str
    source: GgufTensor

    scale_dtype = torch.float16
    group_size = _GROUP

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.source.shape
        return outputs, inputs

    @property
    def kind(self) -> Kind:
        """Of the codes."""
        return Kind(_CODE_BITS[self.source.kind.name], _GROUP)

    def codes(self) -> torch.Tensor:
        """Uint8 `[outputs, inputs]`, whose low bits are numbers with a sign."""
        found = self._blocks()[:, _SCALE_NBYTES:]
        if self.kind.bits == 4:  # the low halves are a block's first sixteen, and 8 stands for 0
            found = torch.cat([found & 0xF, found >> 4], dim=1) ^ 8
        return found.reshape(self.shape)

    def scales(self) -> torch.Tensor:
        """Float32 `[outputs, groups]`.

        Raises:
            CheckpointError: one is no number.
        """
        found = self._blocks()[:, :_SCALE_NBYTES].contiguous().view(torch.float16).float()
        if not bool(found.isfinite().all()):
            raise CheckpointError(
                f"{self.source.file.path}: {self.source.name} has scales that are infinite or no "
                "numbers: the file is corrupt; download it again"
            )
        return found.view(self.shape[0], -1)

    def zeros(self) -> torch.Tensor | None:
        """None: 0 is in the middle."""
        return None

    def order(self) -> torch.Tensor | None:
        """None: inputs are in order."""
        return None

    def _blocks(self) -> torch.Tensor:
        source = self.source
        num_blocks = math.prod(source.shape) // _GROUP
        return source.file.view(source.begin, source.end, torch.uint8).view(num_blocks, -1)


class GgufFile:
    """One weight of a model, as if it were in a file alone: a `TensorFile`.

    Attributes:
        path: of the file.
        entries: the weight; the dtype of a quantised one is none of torch's.
        weight: its codes, where rows can hold them.
    """

    def __init__(self, key: str, source: GgufTensor, shape: tuple[int, ...] | None = None) -> None:
        self.path: Path = source.file.path
        self._source = source
        kind = source.kind.name
        dtype = PLAIN.get(kind, f"GGUF {kind}")
        entry = TensorEntry(dtype, shape or source.shape, source.begin, source.end)
        self.entries: Mapping[str, TensorEntry] = {key: entry}
        is_coded = kind in _CODE_BITS and len(source.shape) == 2
        self.weight = GgufCodes(key.removesuffix(".weight"), source) if is_coded else None

    def tensor(self, name: str) -> torch.Tensor:
        """A view of plain numbers; else float32."""
        return self._source.tensor().view(self.entries[name].shape)

    def release(self, name: str) -> None:
        """Hand its pages back."""
        assert name in self.entries
        self._source.file.release(self._source.begin, self._source.end)


def tensors_of(header: Any, path: Path) -> dict[str, GgufTensor]:
    """The tensors of a file, by their names in it.

    Raises:
        CheckpointError: numbers in the order of another machine, or of a type that the `gguf`
            package does not dequantise.
    """
    if header.byte_order == "S":
        raise CheckpointError(
            f"{path}: its numbers are big-endian, and this machine's are not: take a file for it"
        )
    _check_kinds(path, header.tensors)
    file = MappedFile(path)
    found = {}
    for tensor in header.tensors:
        begin = int(tensor.data_offset)
        shape = tuple(int(size) for size in reversed(tensor.shape))
        found[tensor.name] = GgufTensor(
            file, tensor.name, tensor.tensor_type, shape, begin, begin + int(tensor.n_bytes)
        )
    return found


def _check_kinds(path: Path, tensors: Sequence[Any]) -> None:
    from gguf import GGML_QUANT_SIZES, dequantize

    names = {tensor.tensor_type: tensor.name for tensor in tensors}
    for kind, name in names.items():
        if kind.name in PLAIN:
            continue
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{path}: {name} is of the type {kind.name}, which the installed gguf package does "
                "not dequantise: take a file of another type, such as Q8_0, Q4_0 or Q4_K_M"
            ) from error
