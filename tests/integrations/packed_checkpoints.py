"""Checkpoints as GPTQ, AWQ and compressed-tensors write them, and what they stand for in float64.

Weights are quantised here, group by group, and packed with integers alone.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from integrations import zoo

Tensors = dict[str, torch.Tensor]
LINEAR = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # of a word's places, the low bits first


@dataclass(frozen=True)
class Format:
    """How linear weights are written.

    `group` is None for one of a whole row; `version` is GPTQ's.
    """

    method: str = "gptq"
    bits: int = 4
    group: int | None = 32
    is_symmetric: bool = True
    version: str = "gptq"
    is_shuffled: bool = False
    scales: torch.dtype = torch.float16

    @property
    def config(self) -> dict[str, Any]:
        size = -1 if self.group is None else self.group
        if self.method == "gptq":
            return {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": size,
                "desc_act": self.is_shuffled,
                "sym": self.is_symmetric,
                "checkpoint_format": self.version,
            }
        if self.method == "awq":
            about = {"bits": self.bits, "group_size": size, "zero_point": True, "version": "gemm"}
            return {"quant_method": "awq", **about}
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.is_symmetric,
            "strategy": "channel" if self.group is None else "group",
            "group_size": self.group,
            "actorder": "group" if self.is_shuffled else None,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*gate$"],
        }


GPTQ = Format()
FORMATS = {
    "gptq": GPTQ,
    "gptq-int8": replace(GPTQ, bits=8, group=16),
    "gptq-row": replace(GPTQ, group=None),
    "gptq-zeros": replace(GPTQ, is_symmetric=False),
    "gptq-v2-zeros": replace(GPTQ, is_symmetric=False, version="gptq_v2", bits=8),
    "gptq-bf16": replace(GPTQ, scales=torch.bfloat16, group=16),
    "awq": Format("awq", is_symmetric=False),
    "awq-16": Format("awq", is_symmetric=False, group=16),
    "compressed": Format("compressed-tensors", scales=torch.bfloat16, group=16),
    "compressed-int8": Format("compressed-tensors", bits=8, group=None, scales=torch.bfloat16),
    "compressed-float32": Format("compressed-tensors", scales=torch.float32, group=16),
    "compressed-zeros": Format("compressed-tensors", is_symmetric=False, group=16),
}
SHUFFLED = replace(GPTQ, is_shuffled=True)
SHUFFLED_ZEROS = replace(FORMATS["compressed-zeros"], is_shuffled=True)


@dataclass(frozen=True)
class Quantised:
    """Codes and zero points without sign `[out, in]`, `[out, groups]`; each input's group."""

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    order: torch.Tensor

    @property
    def exact(self) -> torch.Tensor:
        """Float64 `[out, in]`."""
        zeros = self.zeros.double()[:, self.order]
        return (self.codes.double() - zeros) * self.scales.double()[:, self.order]


def quantise(weight: torch.Tensor, form: Format, seed: int) -> Quantised:
    """The nearest codes; asymmetric ones from the least to the largest value of a group."""
    outputs, inputs = weight.shape
    size, most = form.group or inputs, 2**form.bits - 1
    order = torch.arange(inputs) // size
    if form.is_shuffled:
        order = order[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    num_groups = math.ceil(inputs / size)
    codes = torch.zeros(outputs, inputs, dtype=torch.int64)
    zeros = torch.full((outputs, num_groups), (most + 1) // 2)
    scales = torch.zeros(outputs, num_groups, dtype=form.scales)
    for group in range(num_groups):
        values = weight[:, order == group].double()
        low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)
        step = (high - low) / most
        if form.is_symmetric:
            step = values.abs().amax(1) / (most // 2)
        scales[:, group] = step.to(form.scales)
        step = scales[:, group].double()
        if not form.is_symmetric:
            zeros[:, group] = (-low / step).round().clamp(1, most).long()
        found = (values / step[:, None]).round().long() + zeros[:, group, None]
        codes[:, order == group] = found.clamp(0, most)
    return Quantised(codes, zeros, scales, order)


def words(codes: torch.Tensor, bits: int, columns: list[int] | None = None) -> torch.Tensor:
    """Each row's codes in int32, as many as a word holds, the low bits first."""
    count = 32 // bits
    room = -codes.shape[1] % count
    codes = torch.nn.functional.pad(codes, (0, room)).view(len(codes), -1, count)
    found = sum(codes[..., c] << (bits * i) for i, c in enumerate(columns or range(count)))
    assert isinstance(found, torch.Tensor)
    return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32)


def written(found: Quantised, form: Format) -> Tensors:
    """The tensors of a weight, by their names after the module's."""
    bits = form.bits
    if form.method == "gptq":
        stored = found.zeros - (1 if form.version == "gptq" else 0)
        return {
            "qweight": words(found.codes, bits).T,
            "qzeros": words(stored.T, bits),
            "scales": found.scales.T,
            "g_idx": found.order.int(),
        }
    if form.method == "awq":
        return {
            "qweight": words(found.codes.T, bits, AWQ_COLUMNS),
            "qzeros": words(found.zeros.T, bits, AWQ_COLUMNS),
            "scales": found.scales.T,
        }
    tensors = {
        "weight_packed": words(found.codes, bits),
        "weight_scale": found.scales,
        "weight_shape": torch.tensor(found.codes.shape),
    }
    if form.is_shuffled:
        tensors["weight_g_idx"] = found.order.int()
    if not form.is_symmetric:
        tensors["weight_zero_point"] = words(found.zeros.T, bits).T
    return tensors


def build(folder: Path, form: Format, family: str = "qwen3_moe") -> tuple[Path, Path]:
    """A checkpoint whose linear weights are packed but the head's and routers', and the plain one
    in bf16 that it stands for."""
    packed, plain = folder / "packed", folder / "plain"
    zoo.save_checkpoint(family, packed)
    shutil.copytree(packed, plain)

    def convert(name: str, weight: torch.Tensor, of: Callable[[Quantised], Any]) -> Tensors:
        if not name.endswith(LINEAR):
            return {name: weight}
        return {k: t.contiguous() for k, t in of(quantise(weight, form, len(name))).items()}

    def pack(name: str, weight: torch.Tensor) -> Tensors:
        found = convert(name, weight, lambda q: written(q, form))
        if name in found:
            return found
        return {f"{name.removesuffix('weight')}{last}": t for last, t in found.items()}

    def round_off(name: str, weight: torch.Tensor) -> Tensors:
        return convert(name, weight, lambda q: {name: q.exact.float().bfloat16()})

    zoo.rewrite_shards(packed, pack)
    zoo.rewrite_shards(plain, round_off)
    configure(packed, form.config)
    return packed, plain


def configure(folder: Path, quantisation: dict[str, Any]) -> None:
    """Write a `quantization_config`."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "quantization_config": quantisation}))
