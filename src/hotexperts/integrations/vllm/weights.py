"""From a layer that vLLM has loaded and repacked to a store, a cache and slots in its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hotexperts.errors import UnsupportedModelError
from hotexperts.integrations.vllm.compat import DIALECTS
from hotexperts.integrations.vllm.options import flag

_PREFIXES = ("w13", "w2")


def per_expert_parameters(layer: nn.Module, experts: Any, num_experts: int) -> dict[str, Any]:
    """The layer's tensors that have one row an expert, by name.

    vLLM's quantisation config and its experts object hold the same `Parameter` objects, or are made
    to here, so that whoever changes their data changes what the kernels read.

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
        if not is_per_expert(tensor, num_experts):
            continue
        if not name.startswith(_PREFIXES) or not isinstance(tensor, nn.Parameter):
            raise UnsupportedModelError(_unknown(layer, name, tensor))
        if not any(tensor is other for other in found.values()):
            found[name] = tensor
    if not found:
        raise UnsupportedModelError(f"{label(layer)} has no expert weights: leave the cache off")
    for place, holder, name, value in tensors_of(experts):
        if not is_per_expert(value, num_experts):
            continue
        same = [p for p in found.values() if _is_same(p, value)]
        if not same:
            raise UnsupportedModelError(_unknown(layer, f"{place}.{name}", value))
        setattr(holder, name, same[0])
    return found


def hide_parameters(layer: nn.Module, device: torch.device) -> None:
    """Leave the layer's parameters where they are, hidden from who moves or reloads parameters.

    vLLM would move what it finds among a module's parameters back to where it was loaded. Other
    tensors, made on the host with the weights, come to the device.
    """
    for name in list(layer._parameters):
        object.__setattr__(layer, name, layer._parameters.pop(name))
    for name, value in list(vars(layer).items()):
        if type(value) is torch.Tensor and value.device.type == "cpu":
            object.__setattr__(layer, name, value.to(device))


def kernel_of(layer: Any, method: Any) -> tuple[Any, str]:
    """The experts object that multiplies, and how it is told of pairs (`compat.DIALECTS`).

    Raises:
        UnsupportedModelError: it is not one that we know.
    """
    kernel = getattr(method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    dialect = DIALECTS.get(type(experts).__name__)
    if dialect is None:
        found = type(method).__name__ if experts is None else type(experts).__name__
        raise UnsupportedModelError(
            f"{layer.layer_name} runs on {found}, which does not work with {flag('size')}: "
            f"known are {', '.join(sorted(DIALECTS))}"
        )
    return experts, dialect


def tensors_of(experts: Any) -> list[tuple[str, Any, str, torch.Tensor]]:
    """Tensors of the experts object and of its quantisation config: place, holder, name, value."""
    config = getattr(experts, "quant_config", None)
    holders = {type(experts).__name__: experts}
    for part in ("_a1", "_a2", "_w1", "_w2"):
        if getattr(config, part, None) is not None:
            holders[f"quant_config.{part}"] = getattr(config, part)
    return [
        (place, holder, name, value)
        for place, holder in holders.items()
        for name, value in vars(holder).items()
        if isinstance(value, torch.Tensor)
    ]


def _is_same(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    where = parameter.data_ptr(), parameter.shape, parameter.dtype
    return where == (value.data_ptr(), value.shape, value.dtype)


def is_per_expert(tensor: torch.Tensor, num_experts: int) -> bool:
    """Whether a tensor has one row an expert."""
    return tensor.dim() > 0 and tensor.shape[0] == num_experts and tensor.numel() > 0


def _unknown(layer: nn.Module, name: str, tensor: torch.Tensor) -> str:
    return (
        f"{label(layer)} has a tensor {name} of shape {list(tensor.shape)}, one row an expert, of "
        "which hotexperts does not know what it is: leave the cache off"
    )


def is_quantised(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds numbers of eight bits or fewer."""
    return tensor.dtype.itemsize == 1 or tensor.dtype == torch.int32


def label(layer: nn.Module) -> str:
    """A layer for messages."""
    return f"{type(layer).__name__} ({getattr(layer, 'layer_name', '?')})"
