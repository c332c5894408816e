"""Routers of a model in vLLM that answer with given ids, inside CUDA graphs too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotexperts.bench.vllm.model import Model


class Replay(ABC):
    """Makes the routers answer with `shown`, which lies at a fixed address.

    Attributes:
        shown: int32 `[layers, tokens, K]`; MoE layer l of the model reads layer l mod `layers`.

    Args:
        model: before it captures the graphs that are to be measured.
        num_layers: of the ids.
        top_k: experts a token.
    """

    def __init__(self, model: Model, num_layers: int, top_k: int) -> None:
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        most = model.config.scheduler_config.max_num_batched_tokens
        device = model.runner.device
        self.shown = torch.zeros(num_layers, most, top_k, dtype=torch.int32, device=device)
        layers = model.config.compilation_config.static_forward_context
        moe = [layer for layer in layers.values() if hasattr(layer, "router")]
        number_of = {id(layer.router): i % num_layers for i, layer in enumerate(moe)}
        select = BaseRouter._select_experts

        def replayed(router: Any, *args: Any, **kwargs: Any) -> Any:
            weights, found = select(router, *args, **kwargs)
            found.copy_(self.shown[number_of[id(router)], : found.shape[0]])
            return weights, found

        BaseRouter._select_experts = replayed
        execute = model.runner.execute_model

        def shown(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.show(scheduler_output.total_num_scheduled_tokens)
            return execute(scheduler_output, *args, **kwargs)

        model.runner.execute_model = shown

    @abstractmethod
    def show(self, num_tokens: int) -> None:
        """Fill `shown` for a step of so many tokens, which comes next."""


class SequenceReplay(Replay):
    """Repeats sequences from their first position on: a prompt in one step, then token by token.

    Args:
        model: see `Replay`.
        ids: `[sequence, position, layer, k]`.
    """

    def __init__(self, model: Model, ids: npt.NDArray[Any]) -> None:
        self.num_sequences, self.num_positions, num_layers, top_k = ids.shape
        super().__init__(model, num_layers, top_k)
        ids = np.ascontiguousarray(ids.transpose(0, 2, 1, 3), np.int32)
        self._ids = torch.from_numpy(ids).to(self.shown.device)
        self._rows: list[int] = []
        self._position = 0

    def begin(self, sequences: Sequence[int]) -> None:
        """The next steps are of these sequences, row by row."""
        self._rows = [row % self.num_sequences for row in sequences]
        self._position = 0

    def show(self, num_tokens: int) -> None:
        """See `Replay`; every row has as many tokens of a step."""
        if not self._rows:
            return
        each, rest = divmod(num_tokens, len(self._rows))
        assert not rest, (num_tokens, self._rows)
        positions = slice(self._position, self._position + each)
        rows = [self._ids[row, :, positions] for row in self._rows]
        self.shown[:, :num_tokens].copy_(torch.cat(rows, dim=1))
        self._position += each
