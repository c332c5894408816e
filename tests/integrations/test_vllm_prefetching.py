"""Which gate guesses for which layer in vLLM, by hand; and where nothing may be prefetched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hotexperts.errors import ConfigError
from hotexperts.integrations.vllm import options
from hotexperts.integrations.vllm.caches import ModelCaches
from hotexperts.integrations.vllm.prefetching import (
    check_prefetch,
    find_gate,
    give_guesses,
    may_be_routed,
)

H, E = 6, 4


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(H) + 0.5)


class GemmaNorm(Norm):
    """Its weights count from 1."""


class Mixture(nn.Module):
    def __init__(self, *, has_gate: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False) if has_gate else nn.Identity()
        self.shared_gate = nn.Linear(H, 1)
        self.experts = nn.Module()


class Layer(nn.Module):
    def __init__(self, norm: type[Norm], *, has_gate: bool) -> None:
        super().__init__()
        self.post_attention_layernorm = norm()
        self.mlp = Mixture(has_gate=has_gate)


def model_of(num_layers: int, norm: type[Norm] = Norm, without: int = -1) -> tuple[Any, Any]:
    """A model, and what stands for its cached layers by name."""
    model = nn.Module()
    model.layers = nn.ModuleList(Layer(norm, has_gate=i != without) for i in range(num_layers))
    store = SimpleNamespace(num_experts=E)
    cached = {
        f"layers.{i}.mlp.experts": SimpleNamespace(
            guess=None, provider=SimpleNamespace(store=store)
        )
        for i in range(num_layers)
    }
    return model, cached


def test_the_next_gate_guesses_by_its_own_norm() -> None:
    model, cached = model_of(3)
    assert give_guesses(model, cached) == []
    before, after = model.layers[0], model.layers[1]
    plain = torch.randn(5, H)
    found = cached["layers.0.mlp.experts"].guess(plain * before.post_attention_layernorm.weight)
    expected = after.mlp.gate(plain * after.post_attention_layernorm.weight)
    assert torch.allclose(found, expected, atol=1e-5)
    assert cached["layers.2.mlp.experts"].guess is None, "nobody comes after it"


def test_norms_whose_weights_count_from_one_are_left_out() -> None:
    model, cached = model_of(2, GemmaNorm)
    give_guesses(model, cached)
    hidden = torch.randn(3, H)
    found = cached["layers.0.mlp.experts"].guess(hidden)
    assert torch.allclose(found, model.layers[1].mlp.gate(hidden))


def test_layers_without_a_gate_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, cached = model_of(3, without=1)
    assert give_guesses(model, cached) == ["layers.0.mlp.experts"]
    assert cached["layers.0.mlp.experts"].guess is None
    assert cached["layers.1.mlp.experts"].guess is not None
    (record,) = caplog.records
    assert "no gate is found beside layers.1.mlp.experts: the lift table" in record.message


class FakeProvider:
    """Takes part in nothing but who guesses."""

    def __init__(self) -> None:
        self.store = SimpleNamespace(num_experts=E)
        self.lookahead = self
        self.top_k = 0

    def guess_by_lift(self, top_k: int) -> None:
        self.top_k = top_k


@pytest.mark.parametrize(
    ("prefetch", "without", "by_lift", "is_said"),
    [
        ("router", 1, [4, 0, 0], True),
        ("router", -1, [0, 0, 0], False),
        ("lift", -1, [4, 4, 4], False),
    ],
)
def test_the_lift_table_guesses_where_told_to_or_where_there_is_no_gate(
    prefetch: str,
    without: int,
    by_lift: list[int],
    is_said: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, cached = model_of(3, without=without)
    for layer in cached.values():
        layer.provider = FakeProvider()
    caches = ModelCaches(options.parse({"size": 4, "options": {"prefetch": prefetch}}), None)
    caches.layers, caches.top_k = cached, 4
    caches.give_guesses(model)
    assert [layer.provider.top_k for layer in cached.values()] == [0, 0, 0], "without a lane"
    caches.shared.lanes = {None: None}  # type: ignore[dict-item]
    caches.give_guesses(model)
    assert [layer.provider.top_k for layer in cached.values()] == by_lift
    has_gate = [layer.guess is not None for layer in cached.values()]
    assert has_gate == [prefetch == "router" and not top_k for top_k in by_lift[:2]] + [False]
    assert bool(caplog.records) == is_said
    draft = ModelCaches(caches.options, None, target=caches)
    draft.layers, draft.shared.lanes = cached, caches.shared.lanes
    draft.give_guesses(nn.Module())  # which has no gates
    assert [layer.provider.top_k for layer in cached.values()] == by_lift


def test_quantised_activations_are_not_for_a_router() -> None:
    assert may_be_routed(torch.zeros(1, 2, dtype=torch.bfloat16))
    assert not may_be_routed(torch.zeros(1, 2, dtype=torch.uint8))
    assert not may_be_routed(torch.zeros(1, 2).to(torch.float8_e4m3fn))


def test_two_that_could_be_the_gate_are_none() -> None:
    model, _ = model_of(1)
    model.layers[0].mlp.other = nn.Linear(H, E)
    assert find_gate(dict(model.named_modules()), "layers.0.mlp.experts", E) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_config": SimpleNamespace(device_type="cpu")}, "engine is one for CPUs"),
        ({"parallel_config": SimpleNamespace(enable_expert_parallel=True)}, "experts of all ranks"),
        ({"compilation_config": SimpleNamespace(cudagraph_mode="x")}, "FULL_DECODE_ONLY"),
    ],
)
def test_where_nothing_can_be_prefetched_it_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    piecewise = SimpleNamespace(decode_mode=lambda: SimpleNamespace(name="PIECEWISE"))
    if "compilation_config" in changes:
        changes = {"compilation_config": SimpleNamespace(cudagraph_mode=piecewise)}
    usual = {"parallel_config": SimpleNamespace(enable_expert_parallel=False)}
    config = SimpleNamespace(**usual | changes)
    for prefetch in ("router", "lift"):
        wanted = options.parse({"size": 4, "options": {"prefetch": prefetch}})
        with pytest.raises(ConfigError, match=f"prefetch '{prefetch}' .*{message}"):
            check_prefetch(config, wanted)
    check_prefetch(config, options.parse({"size": 4}))


def test_an_unknown_prefetch_is_refused() -> None:
    with pytest.raises(ConfigError, match="options: prefetch: prefetch is 'all'"):
        options.parse({"size": 4, "options": {"prefetch": "all"}})
