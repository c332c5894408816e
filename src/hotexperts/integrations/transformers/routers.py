"""Where a model's routers are, and what feeds them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from hotexperts.errors import UnsupportedModelError
from hotexperts.integrations import norms
from hotexperts.integrations.transformers import compat

WITHOUT_LOGITS = "record without logits"


class Router(NamedTuple):
    """What decides for one layer.

    Attributes:
        module: the router.
        output: which of its outputs are the logits.
    """

    module: nn.Module
    output: int

    def logits_of(self, output: Any) -> torch.Tensor:
        """The logits in what the router returned."""
        found: torch.Tensor = output[self.output] if isinstance(output, tuple | list) else output
        return found


def find_router(model: nn.Module, experts: nn.Module, *, remedy: str = WITHOUT_LOGITS) -> Router:
    """The router of an experts module, as the model's class names it for `output_router_logits`.

    Args:
        model: with both.
        experts: the experts module.
        remedy: what a refusal says to do.

    Raises:
        UnsupportedModelError: the class names none, or none that belongs to this layer alone.
    """
    kinds = compat.router_kinds(model)
    name = path = name_of(model, experts)
    while kinds and path:
        path = path.rpartition(".")[0]
        near = list(model.get_submodule(path).modules())
        if sum(hasattr(module, "_hotexperts") for module in near) > 1:
            break  # another layer's router is not this one's
        found = [Router(m, index) for m in near for kind, index in kinds if isinstance(m, kind)]
        if len(found) == 1:
            return found[0]
    raise UnsupportedModelError(
        f"{type(model).__name__} does not say where the router logits of {name} are: {remedy}"
    )


def find_layer(model: nn.Module, experts: nn.Module) -> nn.Module | None:
    """The decoder layer of an experts module: what a list of layers holds; None without such."""
    path = name_of(model, experts)
    while path:
        parent = path.rpartition(".")[0]
        if isinstance(model.get_submodule(parent), nn.ModuleList):
            return model.get_submodule(path)
        path = parent
    return None


def find_norm(layer: nn.Module) -> nn.Module | None:
    """The norm between a decoder layer's attention and its experts, by name; None without such."""
    children = dict(layer.named_children())
    found = [children[name] for name in norms.NORMS_BEFORE_EXPERTS if name in children]
    return found[0] if found else None


def name_of(model: nn.Module, module: nn.Module) -> str:
    """Where in the model a module is."""
    return next(name for name, found in model.named_modules() if found is module)
