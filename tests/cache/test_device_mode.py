"""Who manages a cache: what auto comes to, and that asking for the device says what is missing."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from hotexperts.cache.device_mode import ChosenMode, choose_mode
from hotexperts.config import CacheConfig
from hotexperts.errors import ConfigError
from hotexperts.formats import ExpertLayout, TensorSpec
from hotexperts.policy import POLICIES

WORDS = ExpertLayout((TensorSpec("w", (4, 2), torch.bfloat16),))
ODD = ExpertLayout((TensorSpec("w", (4, 2), torch.bfloat16), TensorSpec("b", (3,), torch.uint8)))
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _triton_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with Triton and a GPU; nothing is launched here."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def choose(
    layouts: tuple[ExpertLayout, ...] = (WORDS,), device: torch.device = CUDA, **cache: Any
) -> ChosenMode:
    return choose_mode(CacheConfig(**cache), layouts, device)


def test_auto_is_the_default_and_the_device_where_it_can() -> None:
    assert CacheConfig().mode == "auto"
    assert choose() == ("device", None)
    assert choose(policy="lru", device=torch.device("cuda", 1)) == ("device", None)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"device": CPU}, "no CUDA device"),
        ({"store": "file"}, "experts stay in the file"),
        ({"policy": "slru"}, "policy 'slru' has no kernel"),
        ({"policy": "mine:Policy"}, "policy 'mine:Policy' has no kernel"),
        ({"layouts": (WORDS, ODD)}, "tensors ['b'] of an expert are no multiple of 4 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_auto_is_the_host_elsewhere_and_says_why(given: dict[str, Any], cause: str) -> None:
    assert choose(**given) == ("host", f"host: {cause}")
    with pytest.raises(ConfigError, match="cache_mode"):
        choose(**given, mode="device")


def test_auto_does_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose() == ("host", "host: Triton is not installed")
    with pytest.raises(ConfigError, match="Triton is not installed: install it, or let the host"):
        choose(mode="device")


def test_the_interpreter_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose(device=CPU) == ("host", "host: no CUDA device")
    assert choose(device=CUDA) == ("host", "host: Triton only interprets")
    assert choose(device=CPU, mode="device") == ("device", None)


@pytest.mark.parametrize("policy", POLICIES.names())
def test_what_is_asked_for_has_no_reason(policy: str) -> None:
    assert choose(policy=policy, mode="host") == ("host", None)
