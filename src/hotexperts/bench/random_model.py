"""A model of a shape, with random weights that are the same in every layer of a kind."""

from __future__ import annotations

from typing import Any

import torch

from hotexperts.bench.shapes import Shape
from hotexperts.cache.host_memory import available_host_bytes
from hotexperts.config import format_bytes
from hotexperts.errors import HostMemoryError

_SCALE = 0.02


def random_model(shape: Shape, draw_on: str) -> Any:
    """The model in host memory, bf16; norms are 1.

    Only what is outside of the layers and the first layer of each kind is drawn, on the device
    `draw_on`; the others are copies.

    Raises:
        HostMemoryError: it does not fit.
    """
    model = model_without_weights(shape)
    _require_memory(sum(parameter.nbytes for parameter in model.parameters()))
    model = model.to_empty(device="cpu").eval()
    _restore_rotary(model)
    copies = _copies(model.model.layers)
    is_copied = {id(p) for layer in copies for p in layer.parameters()}
    generator = torch.Generator(draw_on).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) not in is_copied:
                _draw(parameter, generator)
        for layer, source in copies.items():
            for drawn, copied in zip(source.parameters(), layer.parameters(), strict=True):
                copied.copy_(drawn)
    return model


def model_without_weights(shape: Shape) -> Any:
    """The model on the meta device, bf16: it takes no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(shape.model_type, **shape.sizes, tie_word_embeddings=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _require_memory(needed: int) -> None:
    available = available_host_bytes()
    if needed > available:
        raise HostMemoryError(
            f"the shape has {format_bytes(needed)} of weights, {format_bytes(available)} of host "
            "memory is available: give fewer --layers, or free memory"
        )


def _copies(layers: Any) -> dict[Any, Any]:
    """Each layer that is not the first of its kind, and that first one."""
    first: dict[tuple[Any, ...], Any] = {}
    found = {}
    for layer in layers:
        kind = tuple((name, p.shape) for name, p in layer.named_parameters())
        if kind in first:
            found[layer] = first[kind]
        first.setdefault(kind, layer)
    return found


def _draw(parameter: torch.Tensor, generator: torch.Generator) -> None:
    if parameter.dim() == 1:
        parameter.fill_(1)
        return
    options = {"device": generator.device, "dtype": parameter.dtype}
    parameter.copy_(torch.randn(parameter.shape, generator=generator, **options).mul_(_SCALE))


def _restore_rotary(model: Any) -> None:
    """Its frequencies are no parameters, and were on no device."""
    rotary = type(model.model.rotary_emb)(model.config)
    model.model.rotary_emb = rotary
    assert rotary.inv_freq.dtype == torch.float32
