"""One layer's bank fills, ready to launch: which experts they copy, the device knows alone."""

from __future__ import annotations

from typing import Any

import torch

from hotexperts.kernels.gather.layout import GatherLayout

BLOCK_IDS = 128


class BankFill:
    """Launches the kernel for one layer.

    Args:
        num_experts: E.
        num_rows: rows of a bank.
        gather: the copies' layout, of a bank's buffer.
        rows: int32 `[E, row_words]`, page-locked where the device is a GPU.
        passed: int32 `[E]`, a view of the layer's plan state.
        num_programs: programs that copy, beside those that compute.
        num_warps: warps of each.
        block_words: int32 words a program has on the way at once.
    """

    def __init__(
        self,
        num_experts: int,
        num_rows: int,
        gather: GatherLayout,
        rows: torch.Tensor,
        passed: torch.Tensor,
        *,
        num_programs: int = 16,
        num_warps: int = 8,
        block_words: int = 4096,
    ) -> None:
        self.num_rows = num_rows
        self._rows, self._passed = rows, passed
        self._grid = (num_programs,)
        self._constants: dict[str, Any] = {
            "NUM_EXPERTS": num_experts,
            "NUM_ROWS": num_rows,
            "ROW_WORDS": gather.row_words,
            "ROW_OFFSETS": gather.row_offsets,
            "BANK_OFFSETS": gather.slot_offsets,
            "NUM_WORDS": gather.num_words,
            "NUM_TENSORS": len(gather.num_words),
            "BLOCK_E": 1 << max(0, num_experts - 1).bit_length(),
            "BLOCK_N": BLOCK_IDS,
            "BLOCK_WORDS": block_words,
            "num_warps": num_warps,
        }

    def __call__(
        self, part: int, topk_ids: torch.Tensor, local: torch.Tensor, bank: torch.Tensor
    ) -> None:
        """Enqueue one part on the current stream.

        Args:
            part: 0 for the bypassed at places 0 to num_rows - 1, and so on.
            topk_ids: int32 or int64, contiguous; -1 is ignored.
            local: same shape and dtype, written: rows of the bank, -1 where the part does not
                serve the pair.
            bank: int32, the bank's buffer.
        """
        from hotexperts.kernels.gather.triton import fill_bank_kernel

        fill_bank_kernel[self._grid](
            topk_ids,
            local,
            self._passed,
            self._rows,
            bank,
            topk_ids.numel(),
            part * self.num_rows,
            **self._constants,
        )
