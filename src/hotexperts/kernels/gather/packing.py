"""What a packing is: how a tensor lies in a row, if not as it does in a slot."""

from __future__ import annotations

from typing import Protocol

import torch

PLAIN, PACKED12, SCALED = 0, 1, 2  # kinds, which kernels know
FORM_SIZE = 10  # numbers of a form; kernels get those of all tensors in one list


class Packing(Protocol):
    """A form in which 16-bit values lie in a row, block by block.

    Kernels unpack a block at a time; `unpack` says what comes out, bit for bit.
    """

    @property
    def form(self) -> tuple[int, ...]:
        """What a kernel is compiled for: the kind, and at most nine numbers of its own."""
        ...

    @property
    def base(self) -> int:
        """A number that a kernel reads when it runs; it may differ from layer to layer."""
        ...

    @property
    def block_words(self) -> int:
        """Int32 words of a slot that one block makes."""
        ...

    def num_words(self, num_values: int) -> int:
        """Int32 words of a row that so many values take."""
        ...

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """16-bit `[n, num_values]` as int32 `[n, num_words]`, on the same device."""
        ...

    def unpack(self, words: torch.Tensor, num_values: int) -> torch.Tensor:
        """The 16-bit values `[n, num_values]` that int32 `[n, num_words]` makes."""
        ...
