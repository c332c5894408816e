"""A layer's slot tensors in one buffer, and the table by which a kernel finds its way in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
    """

    row_offsets: tuple[int, ...]
    slot_offsets: tuple[int, ...]
    num_words: tuple[int, ...]
    row_words: int
    buffer_words: int

    @classmethod
    def of(
        cls, offsets: tuple[int, ...], sizes: tuple[int, ...], row_nbytes: int, num_rows: int
    ) -> GatherLayout:
        """From a row's layout in bytes and the number of slots.

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
        )

    def buffer(self, device: torch.device) -> torch.Tensor:
        """The uninitialised buffer, int32 `[buffer_words]`."""
        return torch.empty(self.buffer_words, dtype=torch.int32, device=device)
