"""What the next layer will ask for: its router on this layer's own input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hotexperts.integrations.transformers.routers import Router, find_layer, find_norm, find_router


class NextExperts:
    """Guesses one layer's demand from the experts' input of the layer before.

    That input, a norm's output, is scaled to what the next layer's norm would have made of it, as
    if experts and attention between them added nothing, and goes through the next layer's router.

    Args:
        model: with both layers.
        before: the experts module whose input is used.
        after: the experts module whose demand is guessed.

    Raises:
        UnsupportedModelError: the router of `after` is not found.
    """

    def __init__(self, model: nn.Module, before: nn.Module, after: nn.Module) -> None:
        self._router = find_guessing_router(model, after)
        self._scale = _scale(model, before, after)

    @torch.no_grad()
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """The router's logits, `[T, E]`.

        Args:
            hidden: `[T, H]`.
        """
        rows = hidden if self._scale is None else hidden * self._scale
        # Not called as modules are: no hook must take this for the model's own pass.
        logits = self._router.logits_of(self._router.module.forward(rows))
        return logits.reshape(-1, logits.shape[-1]).contiguous()


def find_guessing_router(model: nn.Module, experts: nn.Module) -> Router:
    """The router that guesses an experts module's demand; the model may have no weights yet.

    Raises:
        UnsupportedModelError: it is not found.
    """
    return find_router(model, experts, remedy="use prefetch='off'")


def _scale(model: nn.Module, before: nn.Module, after: nn.Module) -> torch.Tensor | None:
    """From one norm's weights to the other's; None where they are not to be had."""
    weights: list[Any] = []
    for experts in (before, after):
        layer = find_layer(model, experts)
        norm = None if layer is None else find_norm(layer)
        weights.append(getattr(norm, "weight", None))
    old, new = weights
    if old is None or new is None or old.shape != new.shape:
        return None
    scale = new.detach() / old.detach()
    return torch.where(scale.isfinite(), scale, 0)
