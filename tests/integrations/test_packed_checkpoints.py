"""Checkpoints of GPTQ, AWQ and compressed-tensors: the plain one's bits, from codes in memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hotexperts.transformers as hot
from hotexperts.errors import CheckpointError
from integrations import packed_checkpoints as packed
from integrations import zoo
from integrations.packed_checkpoints import FORMATS, SHUFFLED, Format

pytestmark = [pytest.mark.transformers, pytest.mark.interpret]
DEVICE = "cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu"


def load(path: Path, mode: str = "host", **options: Any) -> Any:
    options = {"experts_algorithm": "eager", "expert_cache_size": 3, **options}
    return hot.load(path, cache_mode=mode, device=DEVICE, policy="lru", **options)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(zoo.sample_ids(batch=1, length=12).to(model.device)).logits.cpu()


def tokens(model: Any) -> list[int]:
    ids = zoo.sample_ids(batch=1, length=7).to(model.device)
    return model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()


def resident(path: Path, dtype: str = "auto") -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager")
    return model.to(DEVICE)


def check_same(found: Any, plain: Any) -> None:
    assert torch.equal(logits(found), logits(plain))
    assert tokens(found) == tokens(plain)
    parameters = dict(plain.named_parameters())
    for name, value in found.named_parameters():
        assert torch.equal(value, parameters[name]), name


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_checkpoint_is_the_plain_one(name: str, tmp_path: Path) -> None:
    """Codes in memory, every weight's bits those of float64 arithmetic."""
    form = FORMATS[name]
    folder, plain = packed.build(tmp_path, form)
    model = load(folder)
    check_same(model, resident(plain))
    cache = model.expert_cache
    assert (cache.expert_dtype, cache.relative_errors) == (f"int{form.bits}", {})
    assert f"int{form.bits}: " in cache.packing_report
    assert "as the checkpoint has them" in cache.packing_report
    size = form.bits / 16 + (4 if form.scales == torch.float32 or not form.is_symmetric else 2) / 32
    assert cache.host_nbytes < (size + 0.05) * cache.expert_nbytes
