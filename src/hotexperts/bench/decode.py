"""Timed prefills and decode steps, eager or one captured CUDA graph a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hotexperts.stats import CacheStats

Show = Callable[[int, int], None]  # the next call's position and tokens a row


@dataclass(frozen=True, slots=True)
class Taken:
    """What one batch of sequences took.

    Attributes:
        prefill_ms: of the prompts, together.
        step_ms: of each decode step.
        prefill: counters of the prefill; zeros without a cache.
        decode: counters of the steps.
        last_tokens: of each row.
    """

    prefill_ms: float
    step_ms: list[float]
    prefill: CacheStats
    decode: CacheStats
    last_tokens: list[int]


class Decoder:
    """Prefills eagerly, then decodes greedily step by step; each is timed on its own.

    Args:
        model: resident or cached.
        batch: rows.
        max_positions: of a row, prompt and steps together.
        uses_graph: capture a step, with a static KV cache, and replay it.
        for_tokens: called before each kind of call with its number of tokens, prefill and capture
            or step; for what depends on it.
    """

    def __init__(
        self,
        model: Any,
        *,
        batch: int = 1,
        max_positions: int,
        uses_graph: bool,
        for_tokens: Callable[[int], None] = lambda num_tokens: None,
    ) -> None:
        self.model = model
        self.cache = getattr(model, "expert_cache", None)
        self._max_positions = max_positions
        self._uses_graph = uses_graph
        self._for_tokens = for_tokens
        self._tokens = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
        self._kv: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def sequence(self, prompt: torch.Tensor, show: Show, num_steps: int) -> Taken:
        """One batch of sequences, from an empty KV cache on.

        Args:
            prompt: ids, `[batch, tokens]`.
            show: called before each call.
            num_steps: of decode.
        """
        num_tokens = prompt.shape[1]
        self._fresh_kv()
        if self._uses_graph and self._graph is None:
            self._capture(prompt, show)
        self._count_from_zero()
        show(0, num_tokens)
        self._for_tokens(prompt.numel())
        prefill_ms = self._timed(lambda: self._forward(prompt))
        prefill = self._counted()
        self._for_tokens(len(prompt))
        step_ms = []
        for step in range(num_steps):
            show(num_tokens + step, 1)
            step_ms.append(self._timed(self._graph.replay if self._graph else self._step))
        decode = self._counted()
        return Taken(prefill_ms, step_ms, prefill, decode, self._tokens.flatten().tolist())

    def _timed(self, call: Callable[[], None]) -> float:
        """Milliseconds until all of it is done."""
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return 1e3 * (time.perf_counter() - start)

    def _wait(self) -> None:
        if self._tokens.is_cuda:
            torch.cuda.synchronize()

    def _count_from_zero(self) -> None:
        if self.cache is not None:
            self.cache.reset_stats()

    def _counted(self) -> CacheStats:
        """Counters since the last call."""
        if self.cache is None:
            return CacheStats()
        found = self.cache.stats
        self.cache.reset_stats()
        return CacheStats(**found.as_dict())

    def _fresh_kv(self) -> None:
        if not self._uses_graph:
            self._kv = None
            return
        if self._kv is None:
            from transformers import StaticCache

            self._kv = StaticCache(config=self.model.config, max_cache_len=self._max_positions)
            return
        for layer in self._kv.layers:
            if not layer.is_initialized:
                continue
            layer.keys.zero_()
            layer.values.zero_()
            layer.cumulative_length.zero_()

    def _capture(self, prompt: torch.Tensor, show: Show) -> None:
        num_tokens = prompt.shape[1]
        show(0, num_tokens)
        self._for_tokens(prompt.numel())
        self._forward(prompt)
        show(num_tokens, 1)
        self._for_tokens(len(prompt))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()
        self._fresh_kv()
        if self.cache is not None:
            self.cache.reset()

    def _step(self) -> None:
        self._forward(self._tokens)

    def _forward(self, tokens: torch.Tensor) -> None:
        out = self.model(tokens, past_key_values=self._kv, use_cache=True, logits_to_keep=1)
        self._kv = out.past_key_values
        self._tokens.copy_(out.logits[:, -1:].argmax(-1))
