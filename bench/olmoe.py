"""The OLMoE-1B-7B shape with random weights, and a recorded routing replayed in its routers.

Replay R2: model layer l reads trace layer l mod L, sequence and position as recorded; positions
from 128 on are decode. docs/traces.md has the form of the trace, and how to make one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

PREFILL_TOKENS = 128
TRACE = "moe507m_dev.npz"  # in the folder that --traces names
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 50304,
}


def build(device: str) -> Any:
    """The model on the CPU with random weights, the same in every layer; RMS norms are 1.

    Only what is outside of the layers and the first layer is drawn, on `device`.
    """
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(**SHAPE, tie_word_embeddings=False)
    with torch.device("meta"):
        model = OlmoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    first, *others = model.model.layers
    copied = {id(parameter) for layer in others for parameter in layer.parameters()}
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) not in copied:
                _draw(parameter, generator)
        for layer in others:
            for source, target in zip(first.parameters(), layer.parameters(), strict=True):
                target.copy_(source)
    _restore_rotary(model, config)
    return model


def _draw(parameter: torch.Tensor, generator: torch.Generator) -> None:
    if parameter.dim() == 1:
        parameter.fill_(1)
        return
    options = {"device": generator.device, "dtype": parameter.dtype}
    parameter.copy_(torch.randn(parameter.shape, generator=generator, **options).mul_(0.02))


def _restore_rotary(model: Any, config: Any) -> None:
    rotary = type(model.model.rotary_emb)(config)
    model.model.rotary_emb = rotary
    assert rotary.inv_freq.dtype == torch.float32


class Replay:
    """Makes every router of a model answer with recorded ids.

    The ids lie in one tensor at a fixed address, so that a captured step reads what `show` put
    there last.

    Args:
        trace: the `.npz`.
        model: an OLMoE model.
        device: where its layers compute.
        max_tokens: of one call, where that is more than a recorded sequence has.
    """

    def __init__(self, trace: Path, model: Any, device: str, max_tokens: int = 0) -> None:
        ids = np.load(trace)["ids"]  # [sequence, position, layer, k]
        self.num_sequences, self.num_positions, self._num_layers, self.top_k = ids.shape
        self._ids = torch.from_numpy(ids.astype(np.int64)).to(device).transpose(1, 2).contiguous()
        shape = self._num_layers, max(max_tokens, self.num_positions), self.top_k
        self._shown = torch.zeros(shape, dtype=torch.int64, device=device)
        for layer_index, layer in enumerate(model.model.layers):
            layer.mlp.gate.forward = self._router(layer_index % self._num_layers)

    def show(self, sequence: int, position: int, num_tokens: int) -> None:
        """The next call's tokens are these positions of that sequence."""
        end = position + num_tokens
        self._shown[:, :num_tokens].copy_(self._ids[sequence, :, position:end])

    def show_random(self, num_tokens: int, seed: int) -> None:
        """The next call's tokens each ask for `top_k` different experts, all equally likely."""
        generator = torch.Generator(self._shown.device).manual_seed(seed)
        shape = self._num_layers, num_tokens, SHAPE["num_experts"]
        order = torch.rand(shape, generator=generator, device=self._shown.device).argsort(-1)
        self._shown[:, :num_tokens].copy_(order[..., : self.top_k])

    def _router(self, layer: int) -> Any:
        def forward(hidden: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
            num_tokens = hidden.shape[:-1].numel()
            ids = self._shown[layer, :num_tokens].to(hidden.device)
            weights = hidden.new_full(ids.shape, 1 / self.top_k)
            return None, weights, ids

        return forward
