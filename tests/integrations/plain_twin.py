"""A cached model beside the resident one of plain weights, which it must equal bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import hotexperts.transformers as hot
from integrations import zoo

DEVICE = "cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu"


def load(path: Path, mode: str = "host", **options: Any) -> Any:
    options = {"experts_algorithm": "eager", "expert_cache_size": 3, **options}
    return hot.load(path, cache_mode=mode, device=DEVICE, policy="lru", **options)


def resident(path: Path, dtype: str = "auto") -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager")
    return model.to(DEVICE)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(zoo.sample_ids(batch=1, length=12).to(model.device)).logits.cpu()


def tokens(model: Any) -> list[int]:
    ids = zoo.sample_ids(batch=1, length=7).to(model.device)
    return model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()


def check_same(found: Any, plain: Any) -> None:
    assert torch.equal(logits(found), logits(plain))
    assert tokens(found) == tokens(plain)
    parameters = dict(plain.named_parameters())
    for name, value in found.named_parameters():
        assert torch.equal(value, parameters[name]), name
