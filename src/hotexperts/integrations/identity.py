"""Which model it is, by its weights: two checkpoints of one shape route differently."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_MOST_VALUES = 64  # of a tensor
_NUM_DIGITS = 16


def model_digest(model: Any, experts: Iterable[str]) -> str:
    """A digest of a model that another checkpoint has not, from a few values of many weights.

    Of the layers that have experts, all parameters but those count: routers, attention, norms. They
    come from the checkpoint, where an embedding may be tied or resized. Where no such layer is
    found, all parameters do.

    Args:
        model: loaded, without its experts; of one rank of several, its part.
        experts: paths of its experts modules.

    Returns:
        16 hexadecimal digits, the same on every device.
    """
    modules = dict(model.named_modules())
    layers = {name.rpartition(".")[0].rpartition(".")[0] for name in experts}
    found = {
        f"{layer}.{name}": parameter
        for layer in sorted(layers & modules.keys()) or [""]
        for name, parameter in modules[layer].named_parameters()
        if not parameter.is_meta
    }
    return _digest(found)


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    names = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items()]
    digest = hashlib.sha256("\n".join(names).encode())
    values = [_some_bytes(tensor) for tensor in tensors.values()]
    if len({value.device for value in values}) > 1:  # some are offloaded
        values = [value.cpu() for value in values]
    if values:
        digest.update(torch.cat(values).cpu().numpy().tobytes())  # one copy from the device
    return digest.hexdigest()[:_NUM_DIGITS]


def _some_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Up to 64 values as bytes, evenly spread from the first on."""
    flat = tensor.detach().reshape(-1)
    step = -(-len(flat) // _MOST_VALUES) or 1
    return flat[::step].contiguous().view(torch.uint8)
