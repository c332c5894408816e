"""Routers that answer with given ids, so that a model without training asks as a trained one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import linear


class Replay:
    """Makes every router of a model answer with given ids.

    MoE layer l reads layer l mod L of the ids. They lie in one tensor at a fixed address, so that
    a captured step reads what `show` put there last.

    Args:
        ids: `[sequence, position, layer, k]`, L layers.
        model: whose MoE blocks have a `gate`, which gives logits, weights and ids, and `experts`.
        device: where its layers compute.
        max_tokens: of one call, all rows together.
    """

    def __init__(
        self, ids: npt.NDArray[Any], model: Any, device: str | torch.device, max_tokens: int
    ) -> None:
        self.num_sequences, self.num_positions, self._num_layers, self.top_k = ids.shape
        self._ids = torch.from_numpy(ids.astype(np.int64)).to(device).transpose(1, 2).contiguous()
        shape = self._num_layers, max_tokens, self.top_k
        self._shown = torch.zeros(shape, dtype=torch.int64, device=device)
        blocks = [m for m in model.modules() if hasattr(m, "gate") and hasattr(m, "experts")]
        for index, block in enumerate(blocks):
            block.gate.forward = self._router(index % self._num_layers)

    def show_rows(self, sequences: Sequence[int], position: int, num_tokens: int) -> None:
        """The next call's tokens, row by row, are these positions of these sequences."""
        rows = [self._ids[row, :, position : position + num_tokens] for row in sequences]
        self._shown[:, : len(rows) * num_tokens].copy_(torch.cat(rows, dim=1))

    def _router(self, layer: int) -> Any:
        def forward(hidden: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
            num_tokens = hidden.shape[:-1].numel()
            ids = self._shown[layer, :num_tokens].to(hidden.device)
            weights = hidden.new_full(ids.shape, 1 / self.top_k)
            return None, weights, ids

        return forward


def scored(scores: torch.Tensor, gate: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Given scores of the next layer's experts `[T, E]`, at the price of its router `[E, H]`."""
    return scores + 0 * linear(hidden, gate).float()
