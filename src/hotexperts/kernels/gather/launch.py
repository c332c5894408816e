"""One layer's bank fills, ready to launch: which experts they copy, the device knows alone."""

from __future__ import annotations

from typing import Any

import torch

from hotexperts.kernels.gather.layout import GatherLayout
from hotexperts.kernels.plan.launch import PlanGather
from hotexperts.kernels.plan.layout import Counter, Scalar

BLOCK_IDS = 128
MAX_EXPERTS = 512  # keys of one layer


class BankFill:
    """Launches the kernel for one layer.

    Args:
        plan: the layer's plan, whose state says who passes by.
        gather: the copies' layout, of a bank's buffer.
        num_rows: rows of a bank.
        rows: int32 `[E, row_words]`, page-locked where the device is a GPU.
        layer: tells the layers apart that share the banks.
        num_programs: programs that copy, beside those that compute.
        num_warps: warps of each.
        block_words: int32 words a program has on the way at once.
    """

    def __init__(
        self,
        plan: PlanGather,
        gather: GatherLayout,
        num_rows: int,
        rows: torch.Tensor,
        layer: int,
        *,
        num_programs: int = 16,
        num_warps: int = 8,
        block_words: int = 4096,
    ) -> None:
        layout = plan.layout
        self.num_rows = num_rows
        self.whole = plan.state[Scalar.WHOLE : Scalar.WHOLE + 1]
        self._passed = layout.view(plan.state, "passed")
        self._slot_of = layout.view(plan.state, "slot_of")
        self._copies = plan.counters[Counter.COPIES : Counter.COPIES + 1]
        self._rows = rows
        self._first_key = layer * MAX_EXPERTS
        self._grid = (num_programs,)
        self._constants: dict[str, Any] = {
            "NUM_EXPERTS": layout.num_experts,
            "CAPACITY": layout.capacity,
            "NUM_ROWS": num_rows,
            "ROW_WORDS": gather.row_words,
            "ROW_OFFSETS": gather.row_offsets,
            "BANK_OFFSETS": gather.slot_offsets,
            "NUM_WORDS": gather.num_words,
            "NUM_TENSORS": len(gather.num_words),
            "BLOCK_E": 1 << max(0, layout.num_experts - 1).bit_length(),
            "BLOCK_N": BLOCK_IDS,
            "BLOCK_WORDS": block_words,
            "num_warps": num_warps,
        }

    def __call__(
        self,
        part: int,
        topk_ids: torch.Tensor,
        local: torch.Tensor,
        bank: torch.Tensor,
        ledger: torch.Tensor,
    ) -> None:
        """Enqueue one part on the current stream, after the layer's plan.

        Args:
            part: 0 for the bypassed at places 0 to num_rows - 1, and so on.
            topk_ids: int32 or int64, contiguous; -1 is ignored.
            local: same shape and dtype, written: rows of the bank, -1 where the part does not
                serve the pair.
            bank: int32, the bank's buffer.
            ledger: int32 `[1 + num_rows]`, the bank's: 0, then the key of the expert in each row.
        """
        self._launch(part, topk_ids, local, self.whole, bank, ledger, num_ids=topk_ids.numel())

    def ahead(
        self, part: int, whole: torch.Tensor, bank: torch.Tensor, ledger: torch.Tensor
    ) -> None:
        """Enqueue what the part will be if this layer, too, is asked for nearly all experts.

        Wrong guesses cost their copies and nothing else: the ledger says what is in the bank.

        Args:
            part: as above.
            whole: int32 `[1]`, 1 where the layer before was asked for nearly all experts.
            bank: as above.
            ledger: as above.
        """
        self._launch(part, self._slot_of, self._slot_of, whole, bank, ledger, is_ahead=True)

    def _launch(
        self,
        part: int,
        topk_ids: torch.Tensor,
        local: torch.Tensor,
        whole: torch.Tensor,
        bank: torch.Tensor,
        ledger: torch.Tensor,
        *,
        num_ids: int = 0,
        is_ahead: bool = False,
    ) -> None:
        from hotexperts.kernels.gather.triton import fill_bank_kernel

        fill_bank_kernel[self._grid](
            topk_ids,
            local,
            self._passed,
            self._slot_of,
            whole,
            ledger,
            self._copies,
            self._rows,
            bank,
            num_ids,
            part * self.num_rows,
            self._first_key,
            AHEAD=is_ahead,
            **self._constants,
        )
