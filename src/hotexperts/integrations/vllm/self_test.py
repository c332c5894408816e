"""The self-test at load: one random batch through a layer, over all experts and over its cache."""

from __future__ import annotations

from typing import Any

import torch

from hotexperts.errors import UnsupportedModelError
from hotexperts.integrations.vllm.options import flag
from hotexperts.integrations.vllm.weights import is_quantised

SEED = 0
# Of the norm of a token's output. Kernels that split a sum by the order of their blocks round to
# bfloat16 in another place (1e-3); a row that belongs to another expert is off by its own size.
TOLERANCE = 1e-2
# Where all activations share one scale, it is in a wave that of the rows which the wave computes:
# they are rounded to eight bits by another scale than all rows together.
TOLERANCE_OF_SHARED_SCALES = 1.5e-1


class SelfTest:
    """What a layer gives over all of its experts, to be compared with what its cache gives.

    Args:
        layer: vLLM's `RoutedExperts`, loaded and repacked, its experts still whole.
        method: its quantisation method, whose `apply` runs the layer.
        prefill_tokens: calls of more tokens are prefills.
    """

    def __init__(self, layer: Any, method: Any, prefill_tokens: int) -> None:
        self._layer, self._method = layer, method
        device = next(iter(layer.parameters())).device
        num_experts, top_k = layer.global_num_experts, layer.top_k
        # Every expert twice, so that a cache runs over and streams; as a decode and as a prefill.
        num_tokens = max(-(-2 * num_experts // top_k), prefill_tokens + 1)
        generator = torch.Generator(device).manual_seed(SEED)
        # vLLM loads under its model's default dtype.
        options: dict[str, Any] = {
            "generator": generator,
            "device": device,
            "dtype": torch.float32,
        }
        hidden = torch.randn(num_tokens, layer.hidden_size, **options)
        self._hidden = hidden.to(layer.moe_config.in_dtype)
        weights = torch.rand(num_tokens, top_k, **options) + 0.5
        ids = torch.arange(num_tokens * top_k, dtype=torch.int32, device=device) % num_experts
        self._routing = weights / weights.sum(-1, keepdim=True), ids.view(num_tokens, top_k)
        self._batches = (1, min(num_tokens, prefill_tokens), num_tokens)
        self._tolerance = TOLERANCE
        if has_shared_scale(method.moe_kernel.fused_experts):
            self._tolerance = TOLERANCE_OF_SHARED_SCALES
        self._expected = [self._run(rows) for rows in self._batches]

    def check(self) -> None:
        """Run the same batches again, over the cache that is there now.

        Raises:
            UnsupportedModelError: another output.
        """
        for rows, expected in zip(self._batches, self._expected, strict=True):
            error = _largest_error(self._run(rows), expected)
            if not error <= self._tolerance:
                raise UnsupportedModelError(
                    f"self-test of {self._layer.layer_name}: over the cache a token's output "
                    f"differs by {error:.1%} from that over all experts, of {rows} tokens "
                    f"({type(self._method).__name__}). Please report this model, and run it "
                    f"without {flag('size')}"
                )

    def _run(self, num_tokens: int) -> torch.Tensor:
        weights, ids = self._routing
        out = self._method.apply(
            layer=self._layer,
            x=self._hidden[:num_tokens].clone(),
            topk_weights=weights[:num_tokens].clone(),
            topk_ids=ids[:num_tokens].clone(),
            shared_experts=None,
            shared_experts_input=None,
        )
        return out.double()


def _largest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of a token: the norm of the difference over that of what is expected.

    What overflows in both is equal.
    """
    both = ~found.isfinite() & ~expected.isfinite()
    found, expected = found.masked_fill(both, 0), expected.masked_fill(both, 0)
    norms = expected.norm(dim=-1).clamp(min=torch.finfo(expected.dtype).tiny)
    errors = (found - expected).norm(dim=-1) / norms
    return float(errors.nan_to_num(float("inf")).max())


def has_shared_scale(experts: Any) -> bool:
    """Whether activations are quantised by one scale that follows from all of a call's rows."""
    config: Any = getattr(experts, "quant_config", None)
    if getattr(config, "quant_dtype", None) is None:
        return False
    is_static = config.a2_scale is not None
    return not (is_static or config.per_act_token_quant or config.block_shape is not None)


def is_wanted(choice: bool | None, layer: Any, parameters: dict[str, Any]) -> bool:
    """Whether to test a layer: as the user chose, else where its weights are quantised.

    Never where a call talks to other ranks, which are not there yet.
    """
    parallel = getattr(layer.moe_config, "moe_parallel_config", None)
    if getattr(parallel, "use_all2all_kernels", False):
        return False
    return any(map(is_quantised, parameters.values())) if choice is None else choice
