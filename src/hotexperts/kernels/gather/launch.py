"""One layer's bank fills, ready to launch: which experts they copy, the device knows alone."""

from __future__ import annotations

from typing import Any

import torch

from hotexperts.kernels.device import current
from hotexperts.kernels.gather.layout import GatherLayout
from hotexperts.kernels.plan.launch import PlanGather
from hotexperts.kernels.plan.layout import Counter

BLOCK_IDS = 128


class BankFill:
    """Launches the kernel for one layer.

    Args:
        plan: the layer's plan, whose state says who passes by.
        gather: the copies' layout, of a bank's buffer.
        num_rows: rows of a bank.
        rows: int32 `[E, row_words]`, page-locked where the device is a GPU.
        num_programs: programs that copy, beside those that compute.
        num_warps: warps of each.
        block_words: int32 words a program has on the way at once.

    Attributes:
        used_ahead: memory on the device that `rows` uses, which the layer's own calls may not wait
            for.
    """

    def __init__(
        self,
        plan: PlanGather,
        gather: GatherLayout,
        num_rows: int,
        rows: torch.Tensor,
        *,
        num_programs: int = 16,
        num_warps: int = 8,
        block_words: int = 4096,
    ) -> None:
        layout = plan.layout
        self.num_rows = num_rows
        self._passed = layout.view(plan.state, "passed")
        self._copies = plan.counters[Counter.COPIES : Counter.COPIES + 1]
        self._rows = rows
        self._chosen_fills = torch.zeros(1, dtype=torch.int32, device=plan.state.device)
        self._bases = gather.bases(plan.state.device)
        self.used_ahead = self._copies, self._chosen_fills, self._bases
        self._grid = (num_programs,)
        self._constants: dict[str, Any] = {
            "NUM_EXPERTS": layout.num_experts,
            "NUM_ROWS": num_rows,
            "BANK_OFFSETS": gather.slot_offsets,
            **gather.constants(block_words),
            "BLOCK_E": 1 << max(0, layout.num_experts - 1).bit_length(),
            "BLOCK_N": BLOCK_IDS,
            "num_warps": num_warps,
        }

    def __call__(
        self,
        part: int,
        topk_ids: torch.Tensor,
        local: torch.Tensor,
        row_of: torch.Tensor,
        bank: torch.Tensor,
        num_fills: torch.Tensor,
    ) -> None:
        """Enqueue one part on the current stream, after the layer's plan.

        Args:
            part: 0 for the bypassed at places 0 to num_rows - 1, and so on.
            topk_ids: int32 or int64, contiguous; -1 is ignored.
            local: same shape and dtype, written: rows of the bank, -1 where the part does not
                serve the pair.
            row_of: int32 `[E]`, written: the same by expert.
            bank: int32, the bank's buffer.
            num_fills: int32 `[1]`, the bank's: one is added.
        """
        written = local, row_of
        self._launch(topk_ids, written, self._passed, num_fills, bank, part * self.num_rows)

    def rows(self, row_of: torch.Tensor, bank: torch.Tensor) -> None:
        """Enqueue copies that the host chose, on the current stream.

        Args:
            row_of: int32 `[E]`, where to, -1 for experts that are not copied.
            bank: as above.
        """
        nobody, written = row_of[:0], (row_of, row_of)  # which it already says
        self._launch(nobody, written, row_of, self._chosen_fills, bank, 0)

    def warm_up(self, bank: torch.Tensor) -> None:
        """Load the kernel for both kinds of ids, copying nothing.

        The first launch in a process loads code, which may not happen while a graph is captured.
        """
        nowhere = torch.full_like(self._passed, -1)
        for dtype in (torch.int32, torch.int64):
            nobody = nowhere.new_empty(0, dtype=dtype)
            self._launch(nobody, (nobody, nowhere), nowhere, self._chosen_fills, bank, 0)

    def _launch(
        self,
        topk_ids: torch.Tensor,
        written: tuple[torch.Tensor, torch.Tensor],
        places: torch.Tensor,
        num_fills: torch.Tensor,
        bank: torch.Tensor,
        first: int,
    ) -> None:
        from hotexperts.kernels.gather.triton import fill_bank_kernel

        with current(bank.device):
            fill_bank_kernel[self._grid](
                topk_ids,
                *written,
                places,
                num_fills,
                self._copies,
                self._rows,
                bank,
                self._bases,
                topk_ids.numel(),
                first,
                **self._constants,
            )
