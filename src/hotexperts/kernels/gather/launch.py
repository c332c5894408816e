"""One layer's bank fills, ready to launch: which experts they copy, the device knows alone."""

from __future__ import annotations

from typing import Any

import torch

from hotexperts.kernels.device import current
from hotexperts.kernels.gather.layout import GatherLayout
from hotexperts.kernels.plan.launch import PlanGather
from hotexperts.kernels.plan.layout import Counter, Scalar

BLOCK_IDS = 128
_num_keys = 0  # one for each expert of each layer, so that a ledger never takes one for another


def _new_keys(num_experts: int) -> int:
    global _num_keys
    first, _num_keys = _num_keys, _num_keys + num_experts
    return first


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
        layout, device = plan.layout, plan.state.device
        self.num_rows = num_rows
        self.whole = plan.state[Scalar.WHOLE : Scalar.WHOLE + 1]
        self._passed = layout.view(plan.state, "passed")
        self._slot_of = layout.view(plan.state, "slot_of")
        self._copies = plan.counters[Counter.COPIES : Counter.COPIES + 1]
        self._rows = rows
        self.first_key = _new_keys(layout.num_experts)
        # What a fill ahead goes by: every program of it must see the same.
        self._seen = torch.zeros(1 + layout.num_experts, dtype=torch.int32, device=device)
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

    @property
    def read_later(self) -> list[torch.Tensor]:
        """What a fill ahead may still read or write when its layer is gone."""
        return [self._seen, self._passed, self._copies]

    def __call__(
        self,
        part: int,
        topk_ids: torch.Tensor,
        local: torch.Tensor,
        row_of: torch.Tensor,
        bank: torch.Tensor,
        ledger: torch.Tensor,
    ) -> None:
        """Enqueue one part on the current stream, after the layer's plan.

        Args:
            part: 0 for the bypassed at places 0 to num_rows - 1, and so on.
            topk_ids: int32 or int64, contiguous; -1 is ignored.
            local: same shape and dtype, written: rows of the bank, -1 where the part does not
                serve the pair.
            row_of: int32 `[E]`, written: the same by expert.
            bank: int32, the bank's buffer.
            ledger: int32 `[1 + num_rows]`, the bank's: 0, then the key of the expert in each row.
        """
        written, num_ids = (local, row_of), topk_ids.numel()
        self._launch(part, topk_ids, written, self.whole, bank, ledger, num_ids=num_ids)

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
        # The layer's next plan, or a reset, may write these while the fill runs.
        self._seen[:1].copy_(whole)
        self._seen[1:].copy_(self._slot_of)
        nothing = self._passed, self._passed
        self._launch(part, self._passed, nothing, self._seen[:1], bank, ledger, is_ahead=True)

    def _launch(
        self,
        part: int,
        topk_ids: torch.Tensor,
        written: tuple[torch.Tensor, torch.Tensor],
        whole: torch.Tensor,
        bank: torch.Tensor,
        ledger: torch.Tensor,
        *,
        num_ids: int = 0,
        is_ahead: bool = False,
    ) -> None:
        from hotexperts.kernels.gather.triton import fill_bank_kernel

        with current(bank.device):
            fill_bank_kernel[self._grid](
                topk_ids,
                *written,
                self._passed,
                self._seen[1:],
                whole,
                ledger,
                self._copies,
                self._rows,
                bank,
                num_ids,
                part * self.num_rows,
                self.first_key,
                AHEAD=is_ahead,
                **self._constants,
            )
