"""One layer's prefetch, ready to launch."""

from __future__ import annotations

from typing import Any

import torch

from hotexperts.kernels.device import current
from hotexperts.kernels.gather.ahead import AheadRows
from hotexperts.kernels.gather.layout import GatherLayout
from hotexperts.kernels.plan.launch import PlanGather


class Prefetch:
    """Launches the kernel for one layer, the one that is guessed for.

    Args:
        plan: the layer's, made with the same rows ahead.
        ahead: the rows.
        gather: how the layer's rows lie in the store, and in the buffer of the rows ahead.
        rows: int32 `[E, row_words]`, page-locked where the device is a GPU.
        first_key: as the plan's.
        num_warps: of each program.
        block_words: as the plan's.

    Attributes:
        bases: int32, of packed tensors.
        blocks_per_row: of all programs together.
    """

    def __init__(
        self,
        plan: PlanGather,
        ahead: AheadRows,
        gather: GatherLayout,
        rows: torch.Tensor,
        first_key: int,
        *,
        num_warps: int = 8,
        block_words: int = 4096,
    ) -> None:
        assert gather.slot_offsets == ahead.offsets, "of the same buffer"
        layout = plan.layout
        self._slot_of = layout.view(plan.state, "slot_of")
        self._counters = plan.ahead_counters
        self._ahead, self._rows, self._first_key = ahead, rows, first_key
        self.bases = gather.bases(ahead.buffer.device)
        self._constants: dict[str, Any] = {
            "NUM_EXPERTS": layout.num_experts,
            "AHEAD_ROWS": ahead.num_rows,
            "STAGING_OFFSETS": gather.slot_offsets,
            **gather.constants(block_words),
            "num_warps": num_warps,
        }
        blocks = self._constants["BLOCKS"]
        self.blocks_per_row = sum(
            -(-words // block) for words, block in zip(gather.num_words, blocks, strict=True)
        )

    def __call__(self, guesses: torch.Tensor) -> None:
        """Enqueue the copies on the current stream.

        Args:
            guesses: int32 `[n]`, experts, the likeliest first, each once; -1 for none.
        """
        from hotexperts.kernels.prefetch.triton import prefetch_kernel

        ahead = self._ahead
        with current(ahead.buffer.device):
            prefetch_kernel[(ahead.num_programs,)](
                guesses,
                self._slot_of,
                ahead.words,
                self._counters,
                self._rows,
                ahead.buffer,
                self.bases,
                self._first_key,
                NUM_GUESSES=guesses.numel(),
                **self._constants,
            )
