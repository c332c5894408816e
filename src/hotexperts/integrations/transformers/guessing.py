"""Guesses of the next layer's demand: its own router, asked before its attention has run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from hotexperts.errors import UnsupportedModelError
from hotexperts.integrations.transformers.routers import (
    find_layer,
    find_norm,
    find_router,
    name_of,
)

_ROUNDING = 1e-5  # of logits: the model chooses by what it makes of them


class Guesser:
    """Guesses one layer's demand from the output of the layer with experts before it.

    That output goes through the norm and the router of the layer that is guessed, as if its
    attention added nothing. Nothing that the model computes changes.

    Args:
        model: with both layers.
        before: an experts module; the output of its decoder layer is used.
        after: the experts module whose demand is guessed.

    Attributes:
        name: of the guessed experts module.
        source: the decoder layer whose output is used.

    Raises:
        UnsupportedModelError: the router or the norm before it is not found, or the router needs
            more than its input.
    """

    def __init__(self, model: nn.Module, before: nn.Module, after: nn.Module) -> None:
        self.name = name_of(model, after)
        self._model_class = type(model).__name__
        self._after = after
        self._router = find_router(model, after, remedy="record without guesses")
        source, layer = find_layer(model, before), find_layer(model, after)
        norm = None if layer is None else find_norm(layer)
        if source is None or norm is None:
            raise self._refusal("does not name the norm before the router of")
        if len(inspect.signature(self._router.module.forward).parameters) != 1:
            raise self._refusal("gives more than hidden states to the router of")
        self.source = source
        self._norm = norm
        self._normed: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None
        self._chose_highest: torch.Tensor | None = None  # on the device, in all that was checked

    @classmethod
    def of_layers(cls, model: nn.Module, experts: Sequence[nn.Module]) -> list[Guesser]:
        """One for each layer but the first.

        Raises:
            UnsupportedModelError: see the class; or there is one layer only.
        """
        if len(experts) < 2:
            raise UnsupportedModelError(
                f"{type(model).__name__} has one layer of experts, and so no next one: "
                "record without guesses"
            )
        return [cls(model, before, after) for before, after in pairwise(experts)]

    @torch.no_grad()
    def guess(self, output: Any, num_tokens: int, num_guesses: int) -> torch.Tensor:
        """The experts of highest logit, `[token, guess]`, the highest first.

        Args:
            output: of the source, hidden states `[..., H]` or a tuple that begins with them.
            num_tokens: of the pass.
            num_guesses: at most all experts.

        Raises:
            UnsupportedModelError: the output is not one row a token.
        """
        hidden = output[0] if isinstance(output, tuple | list) else output
        rows = hidden.reshape(-1, hidden.shape[-1])
        if len(rows) != num_tokens:
            raise self._refusal("has layers whose output is not what goes to the router of")
        # Not called as modules are: no hook must take this for the model's own pass.
        normed = self._norm.forward(rows)
        logits = self._router.logits_of(self._router.module.forward(normed))
        return logits.topk(min(num_guesses, logits.shape[-1]), dim=-1).indices

    def watch(self) -> list[Any]:
        """Hooks that compare with what the model does itself; remove them afterwards."""
        router = self._router.module
        return [
            self._norm.register_forward_hook(self._see_norm),
            router.register_forward_pre_hook(self._see_input),
            router.register_forward_hook(self._see_logits),
            self._after.register_forward_pre_hook(self._see_choice, with_kwargs=True),
        ]

    def check(self) -> None:
        """Compare all choices that were seen; waits for the device.

        Raises:
            UnsupportedModelError: the model did not always choose the highest logits.
        """
        if self._chose_highest is not None and not self._chose_highest.item():
            raise self._refusal("does not go by router logits alone in choosing")

    def _see_norm(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._normed = output

    def _see_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """The router must get what the norm gave, or it is another norm's."""
        normed, self._normed = self._normed, None
        fed = args[0]
        if normed is None or (normed.data_ptr(), normed.numel()) != (fed.data_ptr(), fed.numel()):
            raise self._refusal("does not name the norm before the router of")

    def _see_logits(self, module: nn.Module, args: Any, output: Any) -> None:
        self._logits = self._router.logits_of(output)

    def _see_choice(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """In a prefill, whose many tokens tell: a step of decode is as fast as can be."""
        logits, self._logits = self._logits, None
        ids = args[1] if len(args) > 1 else kwargs["top_k_index"]
        if logits is None or (self._chose_highest is not None and len(ids) == 1):
            return
        logits = logits.detach().reshape(len(ids), -1)
        highest = logits.topk(ids.shape[-1], dim=-1).values[:, -1]
        lowest = logits.gather(1, ids.long()).amin(dim=1)
        found = (lowest >= highest - _ROUNDING).all()
        before = self._chose_highest
        self._chose_highest = found if before is None else before & found

    def _refusal(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._model_class} {what} {self.name}: record without guesses"
        )
