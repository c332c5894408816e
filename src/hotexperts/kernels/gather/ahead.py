"""Rows that are copied before a layer asks for them: where they are, and how far each one is."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from hotexperts.kernels.gather.layout import GatherLayout

NOBODY = -1


class Turn(enum.IntEnum):
    """What a program's first word says, beside the layer: `4 * layer + Turn`."""

    ASKED = 1  # the layer's plan has begun: what is copied for it from now on comes too late
    RUNNING = 2  # rows are on their way for the layer
    DONE = 3  # no more will be copied for it


class Word(enum.IntEnum):
    """Places in a program's words."""

    TURN = 0
    BLOCKS = 1  # copied, of all rows together
    EXPERTS = 2  # from here on: who is in each row, -1 for nobody


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
    many before it stopped; the same program of the plan takes those and copies the others. The two
    agree by a word of their own whose turn it is, so that no plan waits for a prefetch that has
    not begun, and none that begins too late writes what a plan reads.

    Attributes:
        offsets: of each tensor's row 0 in the buffer, in words.
        num_rows: R.
        num_programs: P, of prefetches and plans.
        buffer: int32, the rows, as slots have them.
        words: int32 `[P, 2 + R]`, by `Word`.
    """

    offsets: tuple[int, ...]
    num_rows: int
    num_programs: int
    buffer: torch.Tensor
    words: torch.Tensor

    @classmethod
    def of(cls, layout: GatherLayout, num_rows: int, num_programs: int, device: Any) -> AheadRows:
        """Empty ones; the layout is that of a buffer of so many rows."""
        shape = num_programs, Word.EXPERTS + num_rows
        words = torch.full(shape, NOBODY, dtype=torch.int32, device=device)
        return cls(layout.slot_offsets, num_rows, num_programs, layout.buffer(device), words)
