"""One layer's prefetch, ready to launch."""

from __future__ import annotations

from typing import Any

import torch

from hotexperts.kernels.device import current
from hotexperts.kernels.gather.ahead import AheadRows
from hotexperts.kernels.gather.layout import GatherLayout
from hotexperts.kernels.plan.launch import PlanGather, power_of_two


class Prefetch:
    """Launches the kernel for one layer, the one that is guessed for.

    Args:
        plan: the layer's, made with the same rows ahead.
        ahead: the rows.
        gather: how the layer's rows lie in the store, and in the buffer of the rows ahead.
        rows: int32 `[E, row_words]`, page-locked where the device is a GPU.
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
        *,
        num_warps: int = 8,
        block_words: int = 4096,
    ) -> None:
        assert gather.slot_offsets == ahead.offsets, "of the same buffer"
        layout = plan.layout
        self._slot_of = layout.view(plan.state, "slot_of")
        self._ahead, self._rows, self._plan = ahead, rows, plan
        self.bases = gather.bases(ahead.buffer.device)
        self._constants: dict[str, Any] = {
            "NUM_EXPERTS": layout.num_experts,
            "AHEAD_ROWS": ahead.num_rows,
            "STAGING_OFFSETS": gather.slot_offsets,
            **gather.constants(block_words),
            "BLOCK_E": power_of_two(layout.num_experts),
            "num_warps": num_warps,
        }
        blocks = self._constants["BLOCKS"]
        self.blocks_per_row = sum(
            -(-words // block) for words, block in zip(gather.num_words, blocks, strict=True)
        )

    def __call__(
        self,
        scores: torch.Tensor,
        before: int,
        num_guesses: int,
        num_valid_tokens: torch.Tensor | None = None,
    ) -> None:
        """Enqueue the copies on the current stream.

        Args:
            scores: floating, `[T, E]`, contiguous: the higher, the likelier an expert is asked for.
            before: number of the layer whose plan came last.
            num_guesses: experts that are looked at, those with a slot among them.
            num_valid_tokens: int32 `[1]` on the device; tokens from there on are padding, and guess
                nothing.
        """
        from hotexperts.kernels.prefetch.triton import prefetch_kernel

        ahead, plan = self._ahead, self._plan
        assert scores.shape[1:] == self._slot_of.shape
        assert scores.is_contiguous()
        with current(ahead.buffer.device):
            prefetch_kernel[(ahead.num_programs,)](
                scores,
                self._slot_of if num_valid_tokens is None else num_valid_tokens,
                plan.switch,
                self._slot_of,
                ahead.words,
                plan.ahead_counters,
                self._rows,
                ahead.buffer,
                self.bases,
                len(scores),
                before,
                plan.layer,
                HAS_NUM_VALID=num_valid_tokens is not None,
                NUM_GUESSES=num_guesses,
                **self._constants,
            )
