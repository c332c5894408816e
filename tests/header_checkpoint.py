"""A checkpoint of which only headers are there: who plans reads no more."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

CONFIG = {
    "num_hidden_layers": 2,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "vocab_size": 1000,
}
EXPERT_NBYTES = 3 * 4_000_000


def save(folder: Path, config: dict[str, Any] = CONFIG, *, experts: int = 64) -> Path:
    """A checkpoint of headers, and a hole for the weights: nobody reads them."""
    tensors = {"model.embed_tokens.weight": 5_000_000, "model.layers.0.mlp.gate.weight": 1_000}
    for layer in range(2):
        for expert in range(experts):
            for name in ("gate_proj", "up_proj", "down_proj"):
                key = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                tensors[key] = EXPERT_NBYTES // 3
        tensors[f"model.layers.{layer}.mlp.shared_experts.up_proj.weight"] = 2_000
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for key, nbytes in tensors.items():
        header[key] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [at, at + nbytes]}  # type: ignore[dict-item]
        at += nbytes
    encoded = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + at)
    return folder
