"""From a layer that vLLM has loaded and repacked to a store, a cache and slots in its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hotexperts.errors import UnsupportedModelError

_PREFIXES = ("w13", "w2")


def per_expert_parameters(layer: nn.Module, experts: Any, num_experts: int) -> dict[str, Any]:
    """The layer's tensors that have one row an expert, by name.

    vLLM's quantisation config and its experts object hold the same `Parameter` objects, so whoever
    changes their data changes what the kernels read.

    Args:
        layer: vLLM's `RoutedExperts`, its weights loaded and repacked.
        experts: the object whose `apply` multiplies.
        num_experts: experts of this rank.

    Raises:
        UnsupportedModelError: a per-expert tensor of unknown meaning; it is named.
    """
    found: dict[str, Any] = {}
    for name, tensor in (
        *layer.named_parameters(recurse=False),
        *layer.named_buffers(recurse=False),
    ):
        if not _is_per_expert(tensor, num_experts):
            continue
        if not name.startswith(_PREFIXES) or not isinstance(tensor, nn.Parameter):
            raise UnsupportedModelError(_unknown(layer, name, tensor))
        if not any(tensor is other for other in found.values()):
            found[name] = tensor
    if not found:
        raise UnsupportedModelError(f"{_label(layer)} has no expert weights: leave the cache off")
    known = {tensor.data_ptr() for tensor in found.values()}
    for name, value in _tensors_of(experts):
        if _is_per_expert(value, num_experts) and value.data_ptr() not in known:
            raise UnsupportedModelError(_unknown(layer, f"{type(experts).__name__}.{name}", value))
    return found


def put_slots(layer: nn.Module, parameters: dict[str, Any], slots: Any) -> None:
    """Let the layer's parameters be the slots, and hide them from who moves or reloads parameters.

    vLLM would move what it finds among a module's parameters back to where it was loaded.
    """
    for name, parameter in parameters.items():
        parameter.data = getattr(slots, name)
        for alias in [n for n, p in layer._parameters.items() if p is parameter]:
            layer._parameters.pop(alias)
            object.__setattr__(layer, alias, parameter)


def _tensors_of(experts: Any) -> list[tuple[str, torch.Tensor]]:
    """Tensors that the experts object holds, or its quantisation config does."""
    found = [(n, v) for n, v in vars(experts).items() if isinstance(v, torch.Tensor)]
    config = getattr(experts, "quant_config", None)
    for place in ("_a1", "_a2", "_w1", "_w2"):
        description = getattr(config, place, None)
        for name, value in vars(description).items() if description is not None else ():
            if isinstance(value, torch.Tensor):
                found.append((f"quant_config.{place}.{name}", value))
    return found


def _is_per_expert(tensor: torch.Tensor, num_experts: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == num_experts and tensor.numel() > 0


def _unknown(layer: nn.Module, name: str, tensor: torch.Tensor) -> str:
    return (
        f"{_label(layer)} has a tensor {name} of shape {list(tensor.shape)}, one row an expert, of "
        "which hotexperts does not know what it is: leave the cache off"
    )


def _label(layer: nn.Module) -> str:
    return f"{type(layer).__name__} ({getattr(layer, 'layer_name', '?')})"
