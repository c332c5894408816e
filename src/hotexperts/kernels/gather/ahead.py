"""Rows that are copied before a layer asks for them: where they are, and how far each one is."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from hotexperts.kernels.gather.layout import GatherLayout

STOP = 0  # place of the word by which a layer's plan ends the copies for it
KEYS = 1  # from here on: the key of the expert in each row, -1 for none


class AheadCounter(enum.IntEnum):
    """Places in the int64 counters of one layer."""

    ISSUED = 0  # rows whose copy began
    BLOCKS = 1  # blocks copied ahead, of all programs
    USED = 2  # rows whose expert was admitted
    SAVED = 3  # blocks that a plan took from them


@dataclass(frozen=True)
class AheadRows:
    """Shared by the layers of a model, one after another.

    A program of a prefetch copies every num_programs-th block of the guessed rows, and notes how
    many before it stopped; the same program of the plan takes those and copies the others.

    Attributes:
        offsets: of each tensor's row 0 in the buffer, in words.
        num_rows: R.
        num_programs: of prefetches and plans.
        buffer: int32, the rows, as slots have them.
        words: int32 `[1 + R + num_programs]`: whether to stop, each row's key, and the blocks that
            each program copied.
    """

    offsets: tuple[int, ...]
    num_rows: int
    num_programs: int
    buffer: torch.Tensor
    words: torch.Tensor

    @classmethod
    def of(cls, layout: GatherLayout, num_rows: int, num_programs: int, device: Any) -> AheadRows:
        """Empty ones; the layout is that of a buffer of so many rows."""
        words = torch.zeros(KEYS + num_rows + num_programs, dtype=torch.int32, device=device)
        words[KEYS : KEYS + num_rows] = -1
        return cls(layout.slot_offsets, num_rows, num_programs, layout.buffer(device), words)
