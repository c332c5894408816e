"""What the next layer will ask for: its router on this layer's own input, or the lift table."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from hotexperts.config import Prefetch
from hotexperts.errors import UnsupportedModelError
from hotexperts.integrations.norms import norm_scale
from hotexperts.integrations.transformers.experts import CachedExperts
from hotexperts.integrations.transformers.modules import ExpertsModule
from hotexperts.integrations.transformers.routers import (
    find_layer,
    find_norm,
    find_router,
    name_of,
)
from hotexperts.sizing import ahead_nbytes, lift_nbytes

log = logging.getLogger("hotexperts")


class NextExperts:
    """Guesses one layer's demand from the experts' input of the layer before.

    That input, a norm's output, is scaled to what the next layer's norm would have made of it, as
    if experts and attention between them added nothing, and goes through the next layer's router.

    Args:
        model: with both layers.
        before: the experts module whose input is used.
        after: the experts module whose demand is guessed.

    Raises:
        UnsupportedModelError: the router of `after` is not found, or needs more than hidden states.
    """

    def __init__(self, model: nn.Module, before: nn.Module, after: nn.Module) -> None:
        self._router = find_router(model, after, remedy="use prefetch='lift'")
        if len(inspect.signature(self._router.module.forward).parameters) != 1:
            raise UnsupportedModelError(
                f"{type(model).__name__} gives more than hidden states to the router of "
                f"{name_of(model, after)}: use prefetch='lift'"
            )
        layers = [find_layer(model, experts) for experts in (before, after)]
        old, new = (None if layer is None else find_norm(layer) for layer in layers)
        scale = norm_scale(old, new)
        # As precise as the weights, so that the input keeps its dtype.
        self._scale = None if scale is None or new is None else scale.to(new.weight.dtype)

    @property
    def nbytes(self) -> int:
        """Device bytes beside the model's."""
        return 0 if self._scale is None else self._scale.nbytes

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


def prefetch_nbytes(model: nn.Module, found: Sequence[ExpertsModule], how: Prefetch) -> int:
    """Device bytes that prefetches will take: rows, lift tables, and what scales routers' inputs.

    Args:
        model: its weights other than experts loaded, wherever they are.
        found: its experts modules.
        how: as for `give_guesses`; or "off".
    """
    if how == "off":
        return 0
    needed = ahead_nbytes({layer.layout: layer.layout.row_nbytes for layer in found}.values())
    for before, after in pairwise(found):
        try:
            if how == "router":
                needed += NextExperts(model, before.module, after.module).nbytes
                continue
        except UnsupportedModelError:
            pass
        if before.layout == after.layout:  # as it is with lanes
            needed += lift_nbytes(before.num_experts, after.num_experts)
    return needed


def give_guesses(
    model: nn.Module,
    layers: Sequence[CachedExperts],
    found: Sequence[ExpertsModule],
    how: Prefetch,
) -> None:
    """Let each layer guess for the next one.

    Args:
        model: with the layers.
        layers: in order, their providers joined.
        found: their experts modules.
        how: "router", where that does not work by the lift table; or "lift".
    """
    refused: list[str] = []
    for (cached, before), (_, after) in pairwise(zip(layers, found, strict=True)):
        try:
            if how == "router":
                cached.guess = NextExperts(model, before.module, after.module)
                continue
        except UnsupportedModelError as error:
            refused.append(str(error))
        assert cached.provider.lookahead is not None, "where prefetches are asked for, all have one"
        cached.provider.lookahead.guess_by_lift(after.top_k)
    if refused:
        others = f" (and {len(refused) - 1} more)" if refused[1:] else ""
        log.warning("expert cache: prefetch 'router' guesses by 'lift': %s%s", refused[0], others)
