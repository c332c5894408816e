"""Finding a model's experts modules, taking their parameters out, and refusing what is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from hotexperts.errors import UnsupportedModelError, UnsupportedOperationError
from hotexperts.formats import ExpertLayout, TensorSpec
from hotexperts.integrations.transformers import llama4
from hotexperts.integrations.transformers.compat import (
    KNOWN_PARAMETERS,
    SENTINEL_FLAG,
    SHARED_EXPERTS,
    is_decorated_experts,
)

# What the experts functions need to know of every class; older releases leave some out.
_FLAG_DEFAULTS = {"has_post_expert_norm": False, SENTINEL_FLAG: False}


@dataclass(frozen=True)
class ExpertsModule:
    """One layer's experts: where they are in the model and what they hold.

    Attributes:
        name: the module's path in the model.
        module: the module itself.
        layout: one expert's tensors, as the model's dtypes want them.
        num_experts: experts in the layer.
        top_k: experts a token, as far as the configuration says.
    """

    name: str
    module: nn.Module
    layout: ExpertLayout
    num_experts: int
    top_k: int


def find_experts(model: nn.Module) -> list[ExpertsModule]:
    """Every experts module of a model whose parameters are still in place, in layer order.

    Raises:
        UnsupportedModelError: none, or one whose class or parameters are not known; both are
            named.
    """
    found = []
    for name, module in model.named_modules():
        llama4.adapt(module)
        if is_decorated_experts(module):
            found.append(_describe(name, module))
        elif _looks_like_experts(module):
            raise UnsupportedModelError(
                f"{type(module).__name__} ({name}) holds experts in a form that hotexperts does "
                "not know; load this model without an expert cache"
            )
    if not found:
        raise UnsupportedModelError(_why_nothing(model))
    return found


def _why_nothing(model: nn.Module) -> str:
    """Experts that nobody stacked (Switch, NLLB-MoE), or none at all."""
    for name, module in model.named_modules():
        is_many = isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module) > 1
        if is_many and (name.endswith(".experts") or type(module).__name__.endswith("Experts")):
            return (
                f"{type(module).__name__} ({name}) holds {len(module)} experts as modules of their "
                "own, a form that hotexperts does not know; load this model without an expert cache"
            )
    return (
        f"{type(model).__name__} has no experts: it is not a Mixture-of-Experts model, so there is "
        "nothing to cache; load it with Transformers as it is"
    )


def take_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Remove a module's own parameters; what then uses one of them raises, and computes nothing."""
    taken = dict(module._parameters)
    module._parameters.clear()
    for name in taken:
        module.__dict__[name] = None if taken[name] is None else TakenParameter(name)
    for flag, value in _FLAG_DEFAULTS.items():
        if not hasattr(module, flag):
            setattr(module, flag, value)
    module._is_hf_initialized = True  # or the initialiser looks for what was taken
    return {name: parameter for name, parameter in taken.items() if parameter is not None}


class TakenParameter:
    """Stands where an experts parameter was, for code that computes with it all the same.

    A meta tensor would not do: some of Transformers' implementations then return whatever lies in
    the memory of their result.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for these, and takes a no for an answer
            raise AttributeError(name)
        self._refuse()

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse()

    def __len__(self) -> NoReturn:
        self._refuse()

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        cls("the experts' parameters")._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedOperationError(
            f"{self.__name__} of cached experts is not in the model: leave its experts "
            "implementation at 'hotexperts', or load it without an expert cache"
        )


def _describe(name: str, module: nn.Module) -> ExpertsModule:
    parameters = {n: p for n, p in module._parameters.items() if p is not None}
    unknown = sorted(set(parameters) - KNOWN_PARAMETERS)
    if any(isinstance(value, TakenParameter) for value in vars(module).values()):
        raise UnsupportedOperationError(
            f"{name} has given its experts to a cache already, or to an attach() that failed or is "
            "at work: load the model again"
        )
    if unknown or not parameters:
        raise UnsupportedModelError(
            f"{type(module).__name__} ({name}) has the experts parameters {sorted(parameters)}, "
            f"of which {unknown} are not known; load this model without an expert cache"
        )
    _, num_experts = ExpertLayout.of(parameters)
    return ExpertsModule(
        name, module, layout_of(parameters), num_experts, top_k_of(module.config, num_experts)
    )


def layout_of(parameters: Mapping[str, torch.Tensor]) -> ExpertLayout:
    """One expert's tensors, from parameters `[E, *shape]` that may be on the meta device."""
    return ExpertLayout(
        tuple(TensorSpec(n, tuple(p.shape[1:]), p.dtype) for n, p in parameters.items())
    )


def top_k_of(config: Any, num_experts: int) -> int:
    """Experts a token, as far as a configuration says: the most of any layer; 1 where it is mute.

    Args:
        config: Transformers', of the text part.
        num_experts: that a token cannot ask for more than.
    """
    for name in (
        "num_experts_per_tok",
        "top_k_experts",
        "moe_k",
        "moe_top_k",
        "moe_topk",
        "num_experts_per_token",
    ):
        value = getattr(config, name, None)
        if isinstance(value, list):
            value = max(value)
        if isinstance(value, int) and value > 0:
            return min(value, num_experts)
    return 1


def _looks_like_experts(module: nn.Module) -> bool:
    """An undecorated class called ...Experts with stacked weights, its own or those of a part."""
    name = type(module).__name__
    return name.endswith("Experts") and name not in SHARED_EXPERTS and _holds_a_stack(module)


def _holds_a_stack(module: nn.Module) -> bool:
    """Whether the module or a part of it, at any depth, owns a matrix or a stack of them.

    Linear layers do not count: they make a plain MLP, or experts that nobody stacked. Nor do
    decorated experts, which are known.
    """
    if any(p is not None and p.dim() >= 2 for p in module._parameters.values()):
        return True
    return any(
        _holds_a_stack(part)
        for part in module.children()
        if not isinstance(part, nn.Linear) and not is_decorated_experts(part)
    )
