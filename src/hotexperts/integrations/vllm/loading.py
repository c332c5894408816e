"""How much of a loaded layer goes to the GPU at once to be repacked there: all of it, or a part."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from hotexperts.integrations.vllm.weights import is_quantised

PEAK = 2  # times the bytes of what is repacked: as loaded, and in slots and banks
PEAK_OF_QUANTISED = 3  # as loaded, repacked, and in between
LEAST = 3  # experts at a time: then no part is of one, whose tensors look like those of a layer


def experts_at_once(num_experts: int, nbytes: int, free_nbytes: int) -> int:
    """How many of a layer's experts are repacked at once; all of them where they fit.

    Args:
        num_experts: of the layer.
        nbytes: that all of them take at the peak.
        free_nbytes: on the GPU.
    """
    if nbytes <= free_nbytes or num_experts <= LEAST:
        return num_experts
    most = max(LEAST, num_experts * free_nbytes // nbytes)
    return -(-num_experts // -(-num_experts // most))  # so many parts need no more


def parts(num_experts: int, at_once: int) -> list[range]:
    """Experts of each part, about as many in each."""
    num_parts = -(-num_experts // at_once)
    cuts = [num_experts * part // num_parts for part in range(num_parts + 1)]
    return [range(first, end) for first, end in itertools.pairwise(cuts)]


def free_nbytes(device: torch.device) -> int:
    """Of the GPU, for this process, what its allocator keeps among them."""
    if device.index is None:  # as vLLM has it; not all of PyTorch takes that
        device = torch.device("cuda", torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total) - allocated
    return min(limit, free + torch.cuda.memory_reserved(device) - allocated)


def patch_loading(module: Any) -> None:
    """Keep `vllm...model_loader.utils` from moving a cached layer to a GPU that cannot hold it."""
    original = module.device_loading_context

    @functools.wraps(original)
    def device_loading_context(
        module: Any, target_device: torch.device
    ) -> AbstractContextManager[Any]:
        caches = getattr(getattr(module, "quant_method", None), "expert_caches", None)
        if caches is not None and target_device.type == "cuda":
            at_once = at_once_of(module, target_device)
            if at_once < module.local_num_experts:
                return _left_where_it_is(module, caches, target_device, at_once)
        context: AbstractContextManager[Any] = original(module, target_device)
        return context

    module.device_loading_context = device_loading_context


def at_once_of(layer: Any, device: torch.device) -> int:
    """How many of a loaded layer's experts are repacked at once on a GPU."""
    return experts_at_once(layer.local_num_experts, peak_nbytes(layer), free_nbytes(device))


def peak_nbytes(layer: Any) -> int:
    """What repacking a layer takes at most."""
    parameters = list(layer.parameters(recurse=False))
    peak = PEAK_OF_QUANTISED if any(map(is_quantised, parameters)) else PEAK
    return peak * sum(p.nbytes for p in parameters)


@contextmanager
def _left_where_it_is(
    layer: Any, caches: Any, device: torch.device, at_once: int
) -> Iterator[nn.Module]:
    caches.in_parts = device, at_once
    try:
        yield layer
    finally:
        caches.in_parts = None
