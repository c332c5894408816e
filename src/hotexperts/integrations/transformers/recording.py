"""Recording which experts each token asks for, while a cached model runs.

Hooks copy what the routers chose into buffers on the model's device, and nothing waits for it: one
transfer to the host for each sequence. Nothing that the model computes changes.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hotexperts.errors import UnsupportedModelError, UnsupportedOperationError
from hotexperts.integrations.transformers.guessing import Guesser
from hotexperts.integrations.transformers.routers import Router, find_router

_FIRST_ROWS = 1024
_NOT_RECORDED = -1


class Recorded(NamedTuple):
    """The routing of one sequence.

    Attributes:
        ids: `[token, layer, k]`, int32, as the router lists them; -1 where a layer asks for fewer.
        phase: `[token]`, 0 prefill, 1 decode.
        logits: `[token, layer, expert]`, float32; NaN where a layer has fewer experts; None where
            they were not asked for.
        guesses: `[token, layer, guess]`, int32; row l is guessed at layer l, before layer l + 1
            asks, the likeliest first; -1 in the last layer; None likewise.
    """

    ids: npt.NDArray[np.int32]
    phase: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32] | None = None
    guesses: npt.NDArray[np.int32] | None = None


class RoutingRecorder:
    """Records, inside a `with` block, every forward pass of the model; one sequence at a time.

    Layers are those of `model.expert_cache.names`, in that order. A pass of several tokens is
    prefill, and so is the first one of a sequence. A pass that a captured CUDA graph replays calls
    no hook, and is refused.

    Args:
        model: with an `expert_cache`.
        with_logits: record the routers' logits as well.
        with_guesses: record what the next layer's router makes of each layer's output, too: twice
            as many experts as the layer asks for.

    Raises:
        UnsupportedModelError: `with_logits`, and the model's class does not say where they are;
            `with_guesses`, and the next layer's router or the norm before it is not found.
    """

    def __init__(
        self, model: Any, *, with_logits: bool = False, with_guesses: bool = False
    ) -> None:
        self._model = model
        modules = [model.get_submodule(name) for name in model.expert_cache.names]
        self._ids = [_Rows(name, torch.int32) for name in model.expert_cache.names]
        self._logits = [_Rows(name) for name in model.expert_cache.names if with_logits]
        self._routers = [find_router(model, m) for m in modules] if with_logits else []
        self._guessers = Guesser.of_layers(model, modules) if with_guesses else []
        self._guesses = [_Rows(guesser.name, torch.int32) for guesser in self._guessers]
        self._rows = [*self._ids, *self._logits, *self._guesses]
        self._experts = modules
        self._handles: list[Any] = []
        self._steps: list[int] = []  # tokens of each complete pass
        self._num_done = 0  # their sum
        self._num_tokens = 0  # of the pass that runs

    def __enter__(self) -> RoutingRecorder:
        hooks = self._handles
        hooks.append(self._model.register_forward_pre_hook(self._begin, with_kwargs=True))
        hooks.append(self._model.register_forward_hook(self._end))
        for module, rows in zip(self._experts, self._ids, strict=True):
            hooks.append(module.register_forward_pre_hook(self._ids_hook(rows), with_kwargs=True))
        for router, rows in zip(self._routers, self._logits, strict=True):
            hooks.append(router.module.register_forward_hook(self._logits_hook(router, rows)))
        for guesser, asked, rows in zip(self._guessers, self._ids, self._guesses, strict=False):
            hooks.append(
                guesser.source.register_forward_hook(self._guess_hook(guesser, asked, rows))
            )
            hooks.extend(guesser.watch())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._handles:
            self._handles.pop().remove()

    def take(self) -> Recorded | None:
        """The complete passes since the last call, which begin a new sequence; None if none.

        Waits for the device, once.

        Raises:
            UnsupportedModelError: guesses are recorded, and a router does not choose by its logits.
        """
        steps, num_tokens = self._steps, self._num_done
        self._steps, self._num_done = [], 0
        if not steps:
            return None
        first = np.arange(len(steps)) == 0
        is_prefill = first | (np.array(steps) > 1)
        ids = _stack(self._ids, num_tokens, _NOT_RECORDED).cpu().numpy()
        logits = None
        if self._logits:
            logits = _stack(self._logits, num_tokens, torch.nan).cpu().float().numpy()
        phase = np.repeat(1 - is_prefill.astype(np.int32), steps)
        return Recorded(ids, phase, logits, self._take_guesses(num_tokens))

    def _take_guesses(self, num_tokens: int) -> npt.NDArray[np.int32] | None:
        if not self._guessers:
            return None
        for guesser in self._guessers:
            guesser.check()
        found = _stack(self._guesses, num_tokens, _NOT_RECORDED).cpu().numpy()
        return np.pad(found, ((0, 0), (0, 1), (0, 0)), constant_values=_NOT_RECORDED)

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        fed = kwargs.get("input_ids")
        if fed is None:
            fed = kwargs.get("inputs_embeds", args[0] if args else None)
        if fed is None or len(fed) != 1:
            raise UnsupportedOperationError(
                "routing is recorded one sequence at a time: feed a batch of one"
            )
        self._num_tokens = fed.shape[1]
        for rows in self._rows:
            rows.num_filled = self._num_done

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Count the pass, which is complete."""
        num_tokens = self._num_done + self._num_tokens
        for rows in self._rows:
            if rows.num_filled != num_tokens:
                raise UnsupportedModelError(
                    f"{rows.name} saw {rows.num_filled} of {num_tokens} tokens, or saw them in "
                    "several calls, which is not recorded: record another model"
                )
        self._steps.append(self._num_tokens)
        self._num_done = num_tokens

    def _ids_hook(self, rows: _Rows) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rows.add(args[1] if len(args) > 1 else kwargs["top_k_index"], self._num_tokens)

        return hook

    def _logits_hook(self, router: Router, rows: _Rows) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            rows.add(router.logits_of(output), self._num_tokens)

        return hook

    def _guess_hook(self, guesser: Guesser, asked: _Rows, rows: _Rows) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            rows.add(guesser.guess(output, self._num_tokens, 2 * asked.width), self._num_tokens)

        return hook


class _Rows:
    """One layer's rows on the device, token after token; grows without waiting for it."""

    def __init__(self, name: str, dtype: torch.dtype | None = None) -> None:
        self.name = name
        self.num_filled = 0
        self._dtype = dtype
        self._buffer: torch.Tensor | None = None

    def add(self, values: torch.Tensor, num_tokens: int) -> None:
        """Copy `values`, whose rows are those of `num_tokens` tokens, behind what is there."""
        if values.numel() % num_tokens:
            raise UnsupportedModelError(
                f"{self.name} sees other tokens than the model is fed, which is not recorded: "
                "record another model"
            )
        rows = values.detach().reshape(num_tokens, -1)
        begin, self.num_filled = self.num_filled, self.num_filled + num_tokens
        self._reserve(rows)[begin : self.num_filled].copy_(rows)

    @property
    def width(self) -> int:
        """Of a row, once there is one."""
        assert self._buffer is not None, "a call was recorded"
        return self._buffer.shape[1]

    def read(self, num_tokens: int) -> torch.Tensor:
        """The first rows, `[token, width]`."""
        assert self._buffer is not None, "a pass was complete"
        return self._buffer[:num_tokens]

    def _reserve(self, rows: torch.Tensor) -> torch.Tensor:
        old = self._buffer
        if old is None or len(old) < self.num_filled:
            size = max(_FIRST_ROWS, 2 * self.num_filled)
            new = rows.new_empty(size, rows.shape[1], dtype=self._dtype or rows.dtype)
            if old is not None:
                new[: len(old)].copy_(old)
            self._buffer = old = new
        return old


def _stack(layers: list[_Rows], num_tokens: int, fill: float) -> torch.Tensor:
    """`[token, layer, width]`, layers of less width filled up."""
    found = [rows.read(num_tokens) for rows in layers]
    width = max(rows.shape[1] for rows in found)
    stacked = found[0].new_full((num_tokens, len(found), width), fill)
    for layer, rows in enumerate(found):
        stacked[:, layer, : rows.shape[1]] = rows
    return stacked
