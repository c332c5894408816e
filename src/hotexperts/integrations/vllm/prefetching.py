"""What the next layer will ask for, in vLLM: its gate on the experts' input of the layer before."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from hotexperts.errors import ConfigError
from hotexperts.integrations.vllm.experts import CachedFusedExperts
from hotexperts.integrations.vllm.options import ExpertCacheOptions, flag

NORMS_BEFORE_EXPERTS = ("post_attention_layernorm", "pre_feedforward_layernorm", "ffn_norm")
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


def give_guesses(model: nn.Module, layers: Mapping[str, CachedFusedExperts]) -> int:
    """Let each layer guess for the next one, where that layer's gate is found; how many do.

    Args:
        model: with the layers.
        layers: by vLLM's name of their experts, in the model's order.
    """
    modules = dict(model.named_modules())
    missing = []
    for before, after in itertools.pairwise(layers):
        gate = find_gate(modules, after, layers[after].provider.store.num_experts)
        if gate is None:
            missing.append(after)
            continue
        scale = _scale(modules, before, after)
        layers[before].guess = NextGate(gate.weight.data, getattr(gate, "bias", None), scale)
    if missing:
        log.warning(
            "expert cache: no gate is found beside %s%s: nothing is prefetched for %s",
            missing[0],
            f" and {len(missing) - 1} others" if missing[1:] else "",
            "them" if missing[1:] else "it",
        )
    return sum(layer.guess is not None for layer in layers.values())


def find_gate(modules: Mapping[str, nn.Module], name: str, num_experts: int) -> Any:
    """The one linear layer beside the experts that has a row for each of them; None without."""
    parent = modules.get(name.rpartition(".")[0])
    children = () if parent is None else parent.children()
    found = [child for child in children if _has_rows(getattr(child, "weight", None), num_experts)]
    return found[0] if len(found) == 1 else None


def _has_rows(weight: Any, num_rows: int) -> bool:
    is_matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2
    return is_matrix and weight.is_floating_point() and len(weight) == num_rows


def _scale(modules: Mapping[str, nn.Module], before: str, after: str) -> torch.Tensor | None:
    """From one norm's weights to the other's; None where they are not to be had."""
    old, new = (_norm_weights(modules, name) for name in (before, after))
    if old is None or new is None or old.shape != new.shape:
        return None
    scale = new.float() / old.float()
    return torch.where(scale.isfinite(), scale, 0)


def _norm_weights(modules: Mapping[str, nn.Module], name: str) -> torch.Tensor | None:
    path = name
    while path := path.rpartition(".")[0]:
        for norm in NORMS_BEFORE_EXPERTS:
            found = modules.get(f"{path}.{norm}")
            if found is not None:
                has_offsets = "Gemma" in type(found).__name__  # whose weights count from 1
                return None if has_offsets else getattr(found, "weight", None)
    return None


def may_prefetch(hidden: torch.Tensor) -> bool:
    """Whether this call's graph, if it is in one, lasts until the next layer's call.

    A piecewise graph does not; nor is a router applied to quantised activations.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not hidden.is_floating_point() or hidden.element_size() < 2:
        return False
    if not is_forward_context_available():
        return not torch.cuda.is_current_stream_capturing()
    return str(get_forward_context().cudagraph_runtime_mode).rpartition(".")[2] != "PIECEWISE"


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
