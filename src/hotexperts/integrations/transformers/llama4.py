"""Llama 4: its experts are not dispatched by Transformers, so they are given that form here.

`Llama4TextExperts` runs every expert on every token, each scaled beforehand by its router score.
Scaling the input of one (token, expert) pair and running only the chosen pairs gives the same sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MOE_CLASS = "Llama4TextMoe"
EXPERTS_CLASS = "Llama4TextExperts"


def adapt(module: nn.Module) -> None:
    """Turn a Llama 4 MoE block into a router and dispatched experts; leaves others alone."""
    if type(module).__name__ != MOE_CLASS or type(module.experts).__name__ != EXPERTS_CLASS:
        return
    experts = module.experts
    experts.__class__ = _dispatched_class(type(experts))
    experts.config = module.router.config if hasattr(module.router, "config") else None
    experts.has_gate, experts.is_concatenated, experts.is_transposed = True, True, True
    experts.has_bias = experts.has_post_expert_norm = experts._is_expert_parallel = False
    module.__class__ = _derived(type(module), {"forward": _moe_forward})


def _dispatched_class(base: type[nn.Module]) -> type[nn.Module]:
    def own_forward(
        self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        gate_up = torch.bmm(hidden.unsqueeze(1), self.gate_up_proj[index[:, 0]])
        out = torch.bmm(self._apply_gate(gate_up), self.down_proj[index[:, 0]])
        return out.squeeze(1) * weights

    def forward(self: Any, *args: Any) -> torch.Tensor:
        from hotexperts.integrations.transformers.experts import experts_forward

        if not hasattr(self, "_hotexperts"):  # loading was refused after this class was given
            return own_forward(self, *args)
        return experts_forward(self, *args)

    def apply_gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * self.act_fn(gate)

    forward.__wrapped__ = own_forward  # type: ignore[attr-defined]
    return _derived(base, {"forward": forward, "_apply_gate": apply_gate})


def _derived(base: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    """A subclass under the base's name; a method on the instance would be a reference cycle."""
    return type(base.__name__, (base,), {**members, "__module__": base.__module__})


def _moe_forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(hidden)  # [T, E], zero outside the chosen
    index = torch.topk(logits, self.top_k, dim=1).indices
    scaled = hidden.unsqueeze(1) * scores.gather(1, index).unsqueeze(-1)  # [T, K, H]
    pairs = scaled.reshape(-1, self.hidden_dim)
    routed = self.experts(pairs, index.reshape(-1, 1), torch.ones_like(pairs[:, :1]))
    out = self.shared_expert(hidden)
    out.add_(routed.view(*index.shape, -1).sum(dim=1))
    return out, logits
