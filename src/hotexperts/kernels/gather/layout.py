"""A layer's slot tensors in one buffer, and the table by which a kernel finds its way in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hotexperts.kernels.gather.packing import FORM_SIZE, PLAIN, Packing

ALIGNMENT_WORDS = 64  # 256 bytes, as in a row
WORD_BYTES = 4


@dataclass(frozen=True)
class GatherLayout:
    """Where a row's tensors lie in the store and in the slot buffer, in int32 words.

    Attributes:
        row_offsets: of each tensor in a row; multiples of 64.
        slot_offsets: of each tensor's slot 0 in the buffer; multiples of 64.
        num_words: of each tensor for one expert.
        row_words: of a row.
        buffer_words: of the whole buffer.
        packings: how each tensor lies packed in a row; None where it lies as it is.
    """

    row_offsets: tuple[int, ...]
    slot_offsets: tuple[int, ...]
    num_words: tuple[int, ...]
    row_words: int
    buffer_words: int
    packings: tuple[Packing | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.packings:
            object.__setattr__(self, "packings", (None,) * len(self.num_words))

    @classmethod
    def of(
        cls,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        row_nbytes: int,
        num_rows: int,
        packings: tuple[Packing | None, ...] = (),
    ) -> GatherLayout:
        """From a row's layout in bytes, its tensors' sizes in a slot, and the number of slots.

        Sizes that are no multiple of four bytes are refused by the caller: a word is the unit.
        """
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            words = num_rows * size // WORD_BYTES
            end += -(-words // ALIGNMENT_WORDS) * ALIGNMENT_WORDS
        return cls(
            tuple(offset // WORD_BYTES for offset in offsets),
            tuple(starts),
            tuple(size // WORD_BYTES for size in sizes),
            row_nbytes // WORD_BYTES,
            end,
            packings,
        )

    def constants(self, block_words: int) -> dict[str, Any]:
        """What a kernel that copies rows is compiled for, but for where the slots are.

        Args:
            block_words: words of a plain tensor that a program has on the way at once.
        """
        return {
            "BLOCKS": tuple(
                block_words if packing is None else packing.block_words for packing in self.packings
            ),
            "ROW_WORDS": self.row_words,
            "ROW_OFFSETS": self.row_offsets,
            "NUM_WORDS": self.num_words,
            "FORMS": tuple(number for packing in self.packings for number in _form(packing)),
            "NUM_TENSORS": len(self.num_words),
        }

    def bases(self, device: torch.device) -> torch.Tensor:
        """Int32, one a tensor: what its packing reads at run time."""
        found = [0 if packing is None else packing.base for packing in self.packings]
        return torch.tensor(found, dtype=torch.int32, device=device)

    def buffer(self, device: torch.device) -> torch.Tensor:
        """The uninitialised buffer, int32 `[buffer_words]`."""
        return torch.empty(self.buffer_words, dtype=torch.int32, device=device)


def _form(packing: Packing | None) -> tuple[int, ...]:
    form = (PLAIN,) if packing is None else packing.form
    return form + (0,) * (FORM_SIZE - len(form))
