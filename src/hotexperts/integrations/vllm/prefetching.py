"""What the next layer will ask for, in vLLM: its gate on the experts' input of the layer before.

Where there is no such gate, or "lift" is asked for, the caches' lift tables guess.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from hotexperts.errors import ConfigError
from hotexperts.integrations.norms import NORMS_BEFORE_EXPERTS, norm_scale
from hotexperts.integrations.vllm.experts import CachedFusedExperts
from hotexperts.integrations.vllm.options import ExpertCacheOptions, flag

FULL_GRAPHS = '--compilation-config \'{"cudagraph_mode": "FULL_DECODE_ONLY"}\''
log = logging.getLogger("vllm.hotexperts")


class NextGate:
    """Scores of the next layer's experts, from the input of this layer's.

    That input, a norm's output, is scaled to what the next layer's norm would have made of it.

    Args:
        gate: weights `[E, H]` of the next layer's router.
        bias: its bias `[E]`; None without one.
        scale: from one norm's weights to the other's, `[H]`; None where they are not known.
    """

    def __init__(
        self, gate: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None
    ) -> None:
        self._weights = gate if scale is None else (gate.float() * scale).to(gate.dtype)
        self._bias = bias

    @torch.no_grad()
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[T, E]` of hidden states `[T, H]`."""
        bias = None if self._bias is None else self._bias.to(hidden.dtype)
        return linear(hidden, self._weights.to(hidden.dtype), bias)


def give_guesses(model: nn.Module, layers: Mapping[str, CachedFusedExperts]) -> list[str]:
    """Let each layer guess by the next one's gate; those that cannot, for that is not found.

    Args:
        model: with the layers.
        layers: by vLLM's name of their experts, in the model's order.
    """
    modules = dict(model.named_modules())
    without, missing = [], []
    for before, after in itertools.pairwise(layers):
        gate = find_gate(modules, after, layers[after].provider.store.num_experts)
        if gate is None:
            without.append(before)
            missing.append(after)
            continue
        scale = norm_scale(_norm_of(modules, before), _norm_of(modules, after))
        layers[before].guess = NextGate(gate.weight.data, getattr(gate, "bias", None), scale)
    if missing:
        log.warning(
            "expert cache: no gate is found beside %s%s: the lift table guesses for %s",
            missing[0],
            f" and {len(missing) - 1} others" if missing[1:] else "",
            "them" if missing[1:] else "it",
        )
    return without


def find_gate(modules: Mapping[str, nn.Module], name: str, num_experts: int) -> Any:
    """The one linear layer beside the experts that has a row for each of them; None without."""
    parent = modules.get(name.rpartition(".")[0])
    children = () if parent is None else parent.children()
    found = [child for child in children if _has_rows(getattr(child, "weight", None), num_experts)]
    return found[0] if len(found) == 1 else None


def _has_rows(weight: Any, num_rows: int) -> bool:
    is_matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2
    return is_matrix and weight.is_floating_point() and len(weight) == num_rows


def _norm_of(modules: Mapping[str, nn.Module], name: str) -> nn.Module | None:
    """What feeds the experts of this name; None without such."""
    path = name
    while path := path.rpartition(".")[0]:
        for norm in NORMS_BEFORE_EXPERTS:
            if f"{path}.{norm}" in modules:
                return modules[f"{path}.{norm}"]
    return None


def spans_layers() -> bool:
    """Whether this call's graph, if it is in one, lasts until the next layer's call.

    A piecewise graph does not.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return not torch.cuda.is_current_stream_capturing()
    return str(get_forward_context().cudagraph_runtime_mode).rpartition(".")[2] != "PIECEWISE"


def may_be_routed(hidden: torch.Tensor) -> bool:
    """Whether a router is for such hidden states: not where they are quantised."""
    return hidden.is_floating_point() and hidden.element_size() >= 2


@cache
def warn_of_quantised_inputs() -> None:
    """Once: gates are found, and what the kernel is given is nothing for them."""
    log.warning(
        "expert cache: prefetch 'router' guesses nothing, as this kernel's inputs are quantised: "
        "take prefetch 'lift'"
    )


def check_prefetch(config: Any, wanted: ExpertCacheOptions) -> None:
    """Refuse where a prefetch could not work.

    Raises:
        ConfigError: it is asked for, and the engine has no place for it.
    """
    if wanted.cache.prefetch == "off":
        return
    name = f"{flag('options')}: prefetch {wanted.cache.prefetch!r}"
    if getattr(getattr(config, "device_config", None), "device_type", None) == "cpu":
        raise ConfigError(
            f"{name} runs in kernels of a GPU, and this engine is one for CPUs: leave it out"
        )
    if config.parallel_config.enable_expert_parallel:
        raise ConfigError(
            f"{name} guesses experts of all ranks: leave out --enable-expert-parallel, or prefetch"
        )
    mode = getattr(getattr(config, "compilation_config", None), "cudagraph_mode", None)
    if mode is not None and mode.decode_mode().name == "PIECEWISE":
        raise ConfigError(
            f"{name} spans layers, which a piecewise CUDA graph does not: give {FULL_GRAPHS}, or "
            "leave it out"
        )
