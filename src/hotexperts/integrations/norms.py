"""The norm between a layer's attention and its experts, which both engines' models name alike."""

from __future__ import annotations

from typing import Any

import torch

# What decoder layers call the norm that feeds their router, the name that says more first.
NORMS_BEFORE_EXPERTS = (
    "pre_mlp_layernorm",
    "pre_ff_layernorm",
    "pre_feedforward_layernorm",
    "ffn_norm",
    "post_attention_layernorm",
    "norm",
)
# Parts of the names of classes that multiply by 1 + weight.
COUNTS_FROM_ONE = ("Gemma", "MiniMaxM3", "Muse", "Qwen3Next", "Qwen3_5", "Qwen4", "Step3p7")


def norm_scale(old: Any, new: Any) -> torch.Tensor | None:
    """From what one norm makes of its input to what another one would, float32 `[H]`.

    Args:
        old: the norm whose output is at hand; None: it is not known.
        new: the other one; likewise.

    Returns:
        None where the weights are not to be had, or do not multiply as they are.
    """
    before, after = _weight(old), _weight(new)
    if before is None or after is None or before.shape != after.shape:
        return None
    scale = after.detach().float() / before.detach().float()
    return torch.where(scale.isfinite(), scale, 0)


def _weight(norm: Any) -> torch.Tensor | None:
    if any(part in type(norm).__name__ for part in COUNTS_FROM_ONE):
        return None
    found: torch.Tensor | None = getattr(norm, "weight", None)
    return found
