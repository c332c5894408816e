"""The OLMoE-1B-7B shape with random weights, and a recorded routing replayed in its routers.

Replay R2: model layer l reads trace layer l mod L, sequence and position as recorded; positions
from 128 on are decode. docs/traces.md has the form of the trace, and how to make one.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotexperts.bench import replay
from hotexperts.bench.random_model import random_model
from hotexperts.bench.shapes import SHAPES

PREFILL_TOKENS = 128
TRACE = "moe507m_dev.npz"  # in the folder that --traces names
SHAPE = dict(SHAPES["OLMoE-1B-7B"].sizes)


def build(device: str) -> Any:
    """The model on the CPU; its weights are drawn on `device`."""
    return random_model(SHAPES["OLMoE-1B-7B"], device)


class Replay(replay.Replay):
    """Makes every router of a model answer with recorded ids, one sequence at a time.

    Args:
        trace: the `.npz`.
        model: an OLMoE model.
        device: where its layers compute.
        max_tokens: of one call, where that is more than a recorded sequence has.
    """

    def __init__(self, trace: Path, model: Any, device: str, max_tokens: int = 0) -> None:
        arrays = np.load(trace)
        ids = arrays["ids"]  # [sequence, position, layer, k]
        guesses = arrays["next_layer_from_moe_input"]  # [sequence, position, layer - 1, 16]
        self._guesses = torch.from_numpy(guesses.astype(np.int64))
        self._scores: torch.Tensor | None = None
        super().__init__(ids, model, device, max(max_tokens, ids.shape[1]))

    def show(self, sequence: int, position: int, num_tokens: int) -> None:
        """The next call's tokens are these positions of that sequence."""
        self.show_rows([sequence], position, num_tokens)
        if self._scores is not None and num_tokens == 1:
            guesses = self._guesses[sequence, position].to(self._shown.device)  # [L - 1, 16]
            falling = -torch.arange(guesses.shape[-1], device=guesses.device).float()
            scores = torch.full_like(self._scores, -torch.inf)
            scores[1:, 0].scatter_(1, guesses, falling.expand_as(guesses))
            self._scores.copy_(scores)

    def guess(self, model: Any, *, is_perfect: bool = False) -> None:
        """From now on layers guess what was recorded of the same tokens, one sequence at a time.

        The guesses are those of a trained model's next router on the experts' input; this one's
        routers compute theirs as well, which counts for nothing. The trace's first layer has none.

        Args:
            model: made to prefetch, nothing captured yet.
            is_perfect: layers guess what the next one will ask for instead.
        """
        if is_perfect:
            self._guesses = self._ids[:, 1:].transpose(1, 2).cpu()  # as they were recorded
        shape = self._num_layers, 1, SHAPE["num_experts"]
        self._scores = torch.full(shape, -torch.inf, device=self._shown.device)
        blocks = [m for m in model.modules() if hasattr(m, "gate") and hasattr(m, "experts")]
        for layer, (this, following) in enumerate(itertools.pairwise(blocks), start=1):
            scores = self._scores[layer % self._num_layers]
            this.experts._hotexperts.guess = partial(replay.scored, scores, following.gate.weight)

    def show_random(self, num_tokens: int, seed: int) -> None:
        """The next call's tokens each ask for `top_k` different experts, all equally likely."""
        generator = torch.Generator(self._shown.device).manual_seed(seed)
        shape = self._num_layers, num_tokens, SHAPE["num_experts"]
        order = torch.rand(shape, generator=generator, device=self._shown.device).argsort(-1)
        self._shown[:, :num_tokens].copy_(order[..., : self.top_k])
