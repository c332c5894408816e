"""Repacks a layer whose experts do not fit the GPU whole: some at a time, into a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hotexperts.cache import CPUBackingStore
from hotexperts.cache.store import lay_out
from hotexperts.config import format_bytes
from hotexperts.errors import ConfigError, UnsupportedModelError
from hotexperts.formats import ExpertLayout
from hotexperts.integrations.vllm.loading import parts, peak_nbytes
from hotexperts.integrations.vllm.options import flag
from hotexperts.integrations.vllm.weights import (
    is_per_expert,
    kernel_of,
    label,
    per_expert_parameters,
    tensors_of,
)

# Methods whose repacking was read: what it makes of an expert follows from that expert alone, or
# from a tensor of the layer, which is compared (`_of_layer`).
METHODS = (
    "AutoAWQMoEMethod",
    "AutoGPTQMoEMethod",
    "CompressedTensorsW8A8Fp8MoEMethod",
    "CompressedTensorsWNA16MarlinMoEMethod",
    "CompressedTensorsWNA16MoEMethod",
    "Fp8MoEMethod",
    "GptOssMxfp4MoEMethod",
    "Mxfp4MoEMethod",
    "UnquantizedFusedMoEMethod",
)
_COUNTS = ("local_num_experts", "num_experts")  # attributes that say how many there are


@dataclass(frozen=True, slots=True)
class Repacked:
    """A layer that was repacked in parts.

    Attributes:
        store: all of its experts.
        parameters: those of the last part, which the kernel holds, by name.
    """

    store: CPUBackingStore
    parameters: dict[str, Any]


@torch.no_grad()
def repack_in_parts(
    layer: Any,
    method: Any,
    process: Callable[[Any], None],
    at_once: int,
    device: torch.device,
    *,
    pin: bool,
) -> Repacked:
    """Have vLLM repack a layer as if it had fewer experts, again and again.

    Args:
        layer: vLLM's `RoutedExperts`, loaded on the host; it is left with the experts of the last
            part on the device.
        method: its quantisation method.
        process: what repacks the layer, in place.
        at_once: experts of a part, at most.
        device: where they are repacked.
        pin: page-lock the store.

    Raises:
        UnsupportedModelError: the method does not treat experts one by one.
        ConfigError: the device holds too few of them.
    """
    if type(method).__name__ not in METHODS:
        raise UnsupportedModelError(_needs_the_gpu(layer, method, "is not known to repack"))
    num_experts = layer.local_num_experts
    before = _State(layer), _State(method)
    store: CPUBackingStore | None = None
    first_of_layer: dict[str, torch.Tensor] = {}
    parameters: dict[str, Any] = {}
    experts: Any = None
    for part in parts(num_experts, at_once):
        # Nothing may hold the part before: the room is reckoned for one of them and its rows.
        parameters, experts = {}, None
        for state in before:
            state.restore()
        try:
            _keep(layer, method, part, device)
            process(layer)
        except torch.OutOfMemoryError as error:
            raise ConfigError(_too_small(layer, len(part))) from error
        experts, _ = kernel_of(layer, method)
        parameters = per_expert_parameters(layer, experts, len(part))
        of_layer = _of_layer(layer, experts, len(part))
        if store is None:
            store = CPUBackingStore(_layout(parameters), num_experts, pin=pin)
            first_of_layer = of_layer
        _check_alike(layer, method, first_of_layer, of_layer)
        _add_rows(layer, method, store, parameters, part)
    for held in (layer, method):
        _set_counts(held, len(part), num_experts)
    assert store is not None, "a layer has experts"
    return Repacked(store, parameters)


class _State:
    """An object's attributes, and a module's parameters and buffers, to go back to."""

    def __init__(self, held: Any) -> None:
        self._held = held
        self._found = self._copy(vars(held))

    def restore(self) -> None:
        found = vars(self._held)
        found.clear()
        found.update(self._copy(self._found))

    @staticmethod
    def _copy(found: dict[str, Any]) -> dict[str, Any]:
        own = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
        return {name: value.copy() if name in own else value for name, value in found.items()}


def _keep(layer: Any, method: Any, part: range, device: torch.device) -> None:
    """Make it a layer of these experts alone, on the device."""
    num_experts = layer.local_num_experts
    for name, parameter in list(layer._parameters.items()):
        if parameter is None:
            continue
        if is_per_expert(parameter, num_experts):
            data = parameter.data[part.start : part.stop]
        elif parameter.device != device:
            data = parameter.data
        else:
            continue
        made = nn.Parameter(data.to(device, copy=True), requires_grad=False)
        vars(made).update(vars(parameter))
        layer._parameters[name] = made
    for held in (layer, method):
        _set_counts(held, num_experts, len(part))


def _set_counts(held: Any, num_before: int, num_now: int) -> None:
    for name in _COUNTS:
        if vars(held).get(name) == num_before:
            setattr(held, name, num_now)


def _of_layer(layer: Any, experts: Any, num_here: int) -> dict[str, torch.Tensor]:
    """Tensors that the kernel reads for all experts, by name."""
    found = {name: p.data for name, p in layer.named_parameters(recurse=False)}
    found |= {f"{place}.{name}": value for place, _, name, value in tensors_of(experts)}
    own = {name: t for name, t in found.items() if t.numel() and not is_per_expert(t, num_here)}
    return {name: t.clone() for name, t in own.items()}


def _check_alike(
    layer: Any, method: Any, first: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> None:
    differing = [
        name
        for name in sorted(first.keys() | found.keys())
        if name not in first or name not in found or not torch.equal(first[name], found[name])
    ]
    if differing:
        reason = f"makes {', '.join(differing)} of all experts together, so it cannot repack"
        raise UnsupportedModelError(_needs_the_gpu(layer, method, reason))


def _layout(parameters: dict[str, Any]) -> ExpertLayout:
    return ExpertLayout.of({name: parameter.data for name, parameter in parameters.items()})[0]


def _add_rows(
    layer: Any,
    method: Any,
    store: CPUBackingStore,
    parameters: dict[str, Any],
    part: range,
) -> None:
    tensors = {name: p.data for name, p in parameters.items()}
    if _layout(parameters) != store.layout:
        reason = "gives experts other shapes from part to part, so it cannot repack"
        raise UnsupportedModelError(_needs_the_gpu(layer, method, reason))
    rows = store.rows[part.start : part.stop]
    device = next(iter(tensors.values())).device
    laid_out = rows if device.type == "cpu" else torch.zeros_like(rows, device=device)
    lay_out(store.layout, tensors, laid_out)
    if laid_out is not rows:
        rows.copy_(laid_out)


def _needs_the_gpu(layer: Any, method: Any, reason: str) -> str:
    return (
        f"{type(method).__name__} {reason} a layer in parts, and {label(layer)} does not fit the "
        "GPU whole beside what repacking takes: take a larger GPU, more of them "
        "(--tensor-parallel-size), or a model in another format"
    )


def _too_small(layer: Any, num_here: int) -> str:
    return (
        f"{label(layer)}: the GPU has no room to repack {num_here} experts, which takes up to "
        f"{format_bytes(peak_nbytes(layer))}: free GPU memory, split the model "
        f"(--tensor-parallel-size), or run it without {flag('size')}"
    )
