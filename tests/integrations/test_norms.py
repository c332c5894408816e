"""From one norm's output to another's: by their weights, where these multiply as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hotexperts.integrations.norms import COUNTS_FROM_ONE, norm_scale
from hotexperts.integrations.transformers.routers import find_layer, find_norm
from integrations import zoo

pytestmark = pytest.mark.transformers


def norm_of(*weights: float, dtype: torch.dtype = torch.float32) -> nn.RMSNorm:
    norm = nn.RMSNorm(len(weights), dtype=dtype)
    norm.weight.data.copy_(torch.tensor(weights))
    return norm


def test_the_scale_is_divided_in_float32() -> None:
    """In bfloat16 a quotient of bfloat16 weights would be rounded."""
    old, new = (norm_of(*w, dtype=torch.bfloat16) for w in ((3.0, 2.0, 0.0), (1.0, 5.0, 7.0)))
    scale = norm_scale(old, new)
    assert scale is not None
    assert scale.dtype == torch.float32
    assert torch.equal(scale, torch.tensor([1 / 3, 2.5, 0.0])), "what says nothing is left out"


def test_where_weights_are_not_known_there_is_no_scale() -> None:
    one, two = norm_of(1.0, 2.0), norm_of(1.0, 2.0, 3.0)
    gemma = type("GemmaRMSNorm", (nn.RMSNorm,), {})(2)
    for old, new in ((one, None), (None, one), (one, two), (one, gemma), (one, nn.Identity())):
        assert norm_scale(old, new) is None


@pytest.mark.parametrize("family", zoo.FAMILIES)
@torch.no_grad()
def test_every_familys_weights_multiply_as_they_are_or_are_left_out(family: str) -> None:
    """Asked with ones of both signs, which a norm of any kind leaves as they are."""
    if (why := zoo.known_exception(family)) and not why.startswith("bfloat16 only"):
        pytest.skip(why)
    model = zoo.build_model(family).float()
    _, experts = next(iter(zoo.experts_modules(model)))
    layer = find_layer(model, experts)
    norm = None if layer is None else find_norm(layer)
    if norm is None:
        pytest.skip("names no norm before its experts")
    norm.weight.uniform_(0.5, 2)
    ones = torch.ones(1, len(norm.weight))
    ones[:, ::2] = -1
    gain = ((norm.forward(ones) - norm.forward(-ones)) / 2 * ones)[0]
    if any(part in type(norm).__name__ for part in COUNTS_FROM_ONE):
        assert norm_scale(norm, norm) is None
    else:
        assert torch.allclose(gain, norm.weight, atol=1e-3)
