"""Random weights for vLLM's dummy loader that make experts matter."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def random_weights() -> Iterator[None]:
    """Inside, vLLM draws as `draw_weights` has it."""
    stop = draw_weights()
    try:
        yield
    finally:
        stop()


def draw_weights() -> Callable[[], None]:
    """Let `load_format="dummy"` draw weights that make experts matter; returns what ends it.

    vLLM's own are so small that no error in an expert would be seen, and would take minutes for
    experts that are created on the host: those are drawn when the device has their layer.
    """
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load, loading = DummyModelLoader.load_weights, utils.device_loading_context

    def draw_all(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        for name, tensor in model.state_dict().items():
            if ".experts." not in name:
                _draw(name, tensor)

    @functools.wraps(loading)
    @contextmanager
    def loading_and_drawing(module: torch.nn.Module, target_device: torch.device) -> Iterator[Any]:
        with loading(module, target_device) as found:
            if type(module).__name__.endswith("RoutedExperts"):
                for name, tensor in module.named_parameters(recurse=False):
                    _draw_on(target_device, f"{module.layer_name}.{name}", tensor.data)
            yield found

    def stop() -> None:
        DummyModelLoader.load_weights = load
        utils.device_loading_context = loading

    DummyModelLoader.load_weights = draw_all
    utils.device_loading_context = loading_and_drawing
    return stop


def _draw_on(device: torch.device, name: str, tensor: torch.Tensor) -> None:
    """Draw there, also what stays on the host since the layer does not fit: matrix by matrix."""
    if tensor.device.type == device.type or tensor.dtype != torch.bfloat16 or tensor.dim() < 3:
        _draw(name, tensor)
        return
    for index, matrix in enumerate(tensor):
        drawn = torch.empty_like(matrix, device=device)
        _draw(f"{name}.{index}", drawn)
        matrix.copy_(drawn)


@torch.no_grad()
def _draw(name: str, tensor: torch.Tensor) -> None:
    """By what the name says that the tensor is; the same whatever was drawn before."""
    if tensor.numel() == 0 or "g_idx" in name or "sort_indices" in name or "shape" in name:
        return
    generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
    options: dict[str, Any] = {"generator": generator, "device": tensor.device}
    is_scale = "scale" in name
    if tensor.dtype == torch.uint8 and is_scale:  # powers of two, biased by 127
        tensor.copy_(torch.randint(118, 121, tensor.shape, **options))
    elif "zeros" in name or "zero_point" in name:
        tensor.fill_(0x77777777 if tensor.dtype == torch.int32 else 0)
    elif not tensor.is_floating_point():
        limits = torch.iinfo(tensor.dtype)
        tensor.copy_(torch.randint(limits.min, limits.max, tensor.shape, **options))
    elif is_scale:
        step = 0.03 if tensor.dtype == torch.float32 else 0.006  # of 8 and of 4 bits
        tensor.copy_((0.5 + torch.rand(tensor.shape, **options)) * step)
    elif tensor.dim() == 1 and "bias" not in name:
        tensor.fill_(1)
    elif tensor.dtype.itemsize == 1:
        for row in tensor:
            row.copy_(torch.randn(row.shape, **options))
    else:
        tensor.normal_(std=0.03, generator=generator)
