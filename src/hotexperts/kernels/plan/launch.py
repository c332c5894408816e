"""One layer's plan-and-gather, ready to launch: the constants chosen once, the tensors fixed."""

from __future__ import annotations

from typing import Any

import torch

from hotexperts.errors import ConfigError
from hotexperts.kernels.device import current
from hotexperts.kernels.gather.ahead import AheadRows
from hotexperts.kernels.gather.layout import GatherLayout
from hotexperts.kernels.plan import rules
from hotexperts.kernels.plan.layout import BYPASSING_POLICIES, NUM_COUNTERS, Counter, PlanLayout
from hotexperts.kernels.prefetch.switch import fresh_switch

MAX_IDS = 512  # what every program may count by itself
COUNT_PROGRAMS = 64  # of a launch that counts more
COUNT_BLOCK = 32


class PlanGather:
    """Launches the kernel for one layer; every address is fixed at construction.

    Args:
        layout: the plan's.
        gather: the copies'.
        rows: int32 `[E, row_words]`, page-locked where the device is a GPU.
        buffer: int32 `[buffer_words]`, the slots.
        num_programs: programs that copy; few leave the GPU to compute that runs beside.
        num_warps: warps of each.
        block_words: int32 words a program has on the way at once.
        ahead: rows that a prefetch copied before this layer asked, made for as many programs.
        layer: its number, among those that share the rows.

    Attributes:
        state: int32 `[layout.num_words]`.
        counters: int64, by `Counter`.
        switch: float32, by `Switch`: whether rows come ahead.
    """

    def __init__(
        self,
        layout: PlanLayout,
        gather: GatherLayout,
        rows: torch.Tensor,
        buffer: torch.Tensor,
        *,
        num_programs: int = 16,
        num_warps: int = 8,
        block_words: int = 4096,
        ahead: AheadRows | None = None,
        layer: int = 0,
    ) -> None:
        if layout.policy == "adv" and num_programs < rules.NUM_PLAYED:
            raise ConfigError(
                f"{num_programs} programs: 'adv' needs {rules.NUM_PLAYED}, one for each shadow"
            )
        self.layout = layout
        self.state = layout.fresh(buffer.device)
        self.counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=buffer.device)
        self._rows, self._buffer = rows, buffer
        self.ahead_counters = self.counters[Counter.AHEAD :]
        self.layer = layer
        self.switch = fresh_switch(buffer.device)
        self._ahead = (self.state, buffer) if ahead is None else (ahead.words, ahead.buffer)
        self._counted = torch.zeros(layout.num_experts, dtype=torch.int32, device=buffer.device)
        self._bases = gather.bases(buffer.device)
        self._powers = rules.lcp_table().to(buffer.device)
        self._grid = (num_programs,)
        self._constants: dict[str, Any] = {
            "NUM_EXPERTS": layout.num_experts,
            "CAPACITY": layout.capacity,
            "POLICY": layout.policy,
            "RULES": rules.KERNEL_RULES[layout.policy],
            "SCRATCH": layout.scratch,
            "SHADOW_SCRATCH": layout.shadow_scratch,
            "MAY_BYPASS": layout.policy in BYPASSING_POLICIES,
            "SLOT_OFFSETS": gather.slot_offsets,
            **gather.constants(block_words),
            "STAGING_OFFSETS": gather.slot_offsets if ahead is None else ahead.offsets,
            "AHEAD_ROWS": 0 if ahead is None else ahead.num_rows,
            "BLOCK_E": power_of_two(layout.num_experts),
            "BLOCK_C": power_of_two(layout.capacity),
            "num_warps": num_warps,
            "enable_fp_fusion": False,  # each operation rounds by itself, as the policy does
        }

    def __call__(
        self,
        topk_ids: torch.Tensor,
        remapped: torch.Tensor,
        num_valid_tokens: torch.Tensor | None = None,
        *,
        evict: bool = True,
        max_bypassed: int = 0,
        num_waves: int = 1,
    ) -> None:
        """One event, enqueued on the current stream.

        Args:
            topk_ids: int32 or int64 `[T, K]`, contiguous; -1 is ignored. More than 512 ids are
                counted by a launch of their own.
            remapped: same shape and dtype, written: slots, -1 where a pair is not served.
            num_valid_tokens: int32 `[1]` on the device; tokens from there on are padding, remapped
                to slot 0 for kernels that know no -1.
            evict: False admits into free slots only.
            max_bypassed: as for `Policy.decide`.
            num_waves: what to add to the counter of waves.
        """
        from hotexperts.kernels.plan.triton import plan_gather_kernel

        num_ids, top_k = topk_ids.numel(), topk_ids.shape[-1]
        num_valid = self.state if num_valid_tokens is None else num_valid_tokens
        has_num_valid = num_valid_tokens is not None
        if num_ids > MAX_IDS:
            self._count(topk_ids, num_valid, has_num_valid=has_num_valid)
        with current(self.state.device):
            plan_gather_kernel[self._grid](
                topk_ids,
                num_valid,
                self._counted,
                self.state,
                self.counters,
                remapped,
                self._rows,
                self._buffer,
                self._bases,
                *self._ahead,
                self.switch,
                self.ahead_counters,
                self._powers,
                num_ids,
                top_k,
                max_bypassed,
                int(evict),
                num_waves,
                self.layer,
                HAS_NUM_VALID=has_num_valid,
                HAS_COUNTS=num_ids > MAX_IDS,
                BLOCK_N=min(32, max(2, power_of_two(num_ids))),
                **self._constants,
            )

    def _count(
        self, topk_ids: torch.Tensor, num_valid: torch.Tensor, *, has_num_valid: bool
    ) -> None:
        from hotexperts.kernels.plan.count import count_kernel

        self._counted.zero_()  # also where an interrupt kept the plan from following its count
        with current(self.state.device):
            count_kernel[(COUNT_PROGRAMS,)](
                topk_ids,
                num_valid,
                self._counted,
                topk_ids.numel(),
                topk_ids.shape[-1],
                NUM_EXPERTS=self.layout.num_experts,
                HAS_NUM_VALID=has_num_valid,
                BLOCK_E=self._constants["BLOCK_E"],
                BLOCK_N=COUNT_BLOCK,
            )


def power_of_two(number: int) -> int:
    """The next one, for a block."""
    return 1 << max(0, number - 1).bit_length()
