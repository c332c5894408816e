"""The cached kernel against the full one, on a stand-in of vLLM's Triton experts."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hotexperts.cache import CachedWeightProvider, CPUBackingStore
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.cache.prefetch import PrefetchLane
from hotexperts.cache.streaming import StreamingProvider
from hotexperts.errors import UnsupportedModelError
from hotexperts.integrations.vllm import prefetching
from hotexperts.integrations.vllm.experts import CachedFusedExperts
from hotexperts.integrations.vllm.self_test import (
    SelfTest,
    has_shared_scale,
    is_wanted,
)
from hotexperts.integrations.vllm.weights import hide_parameters, per_expert_parameters

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu"
E, K, H, N = 12, 3, 8, 4


class TritonLikeExperts:
    """One row a pair, rows of absent experts zero, then the sum of rows, as vLLM's has it."""

    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias

    def apply(self, **call: Any) -> None:
        ids = call["topk_ids"].long()
        if call["expert_map"] is not None:
            ids = call["expert_map"].long()[ids.clamp(min=0)].where(ids >= 0, -1)
        w1, w2, hidden = call["w1"], call["w2"], call["hidden_states"]
        rows = torch.zeros(*ids.shape, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
        for t, k in (ids >= 0).nonzero().tolist():
            expert = ids[t, k]
            out = w2[expert] @ torch.relu(w1[expert] @ hidden[t]) + self.bias[expert]
            is_weighted_before = call["apply_router_weight_on_input"]
            weight = 1 if is_weighted_before else call["topk_weights"][t, k].to(out.dtype)
            rows[t, k] = out * weight
        self.moe_sum(rows, call["output"])

    def moe_sum(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        output.copy_(rows.sum(1))


class CPULikeExperts(TritonLikeExperts):
    """Serves every pair; sums in float32. vLLM's knows no map: this one would heed it."""

    def moe_sum(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        output.copy_(rows.float().sum(1))


def make_layer(num_experts: int = E, dtype: torch.dtype = torch.bfloat16) -> Any:
    generator = torch.Generator().manual_seed(0)
    layer: Any = nn.Module()
    for name, shape in {"w13_weight": (N, H), "w2_weight": (H, N), "w2_bias": (H,)}.items():
        data = torch.randn(num_experts, *shape, generator=generator, dtype=dtype)
        layer.register_parameter(name, nn.Parameter(data.to(DEVICE), requires_grad=False))
    layer.layer_name = "model.layers.0.mlp.experts"
    return layer


def cached(layer: Any, experts: Any, capacity: int, dialect: str) -> CachedFusedExperts:
    num_experts = len(layer.w13_weight)
    parameters = per_expert_parameters(layer, experts, num_experts)
    store = CPUBackingStore.from_tensors(
        {name: p.data for name, p in parameters.items()}, pin=DEVICE == "cuda"
    )
    provider: StreamingProvider
    if dialect == "map":
        provider = DeviceWeightProvider(store, capacity, device=DEVICE)
    else:
        provider = CachedWeightProvider(store, capacity, device=DEVICE)
    for buffer in [provider.slot_buffer, *(provider._banks.buffers if provider._banks else [])]:
        buffer.zero_()
    hide_parameters(layer, torch.device(DEVICE))
    return CachedFusedExperts(provider, experts, parameters, dialect, prefill_tokens=8)


def make_call(layer: Any, num_tokens: int, seed: int, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    num_ids, dtype = changes.pop("num_ids", E), changes.pop("dtype", torch.bfloat16)
    ids = torch.rand(num_tokens, num_ids, generator=generator).argsort(-1)[:, :K].int()
    call = {
        "output": torch.full((num_tokens, H), 7.0, dtype=dtype),
        "hidden_states": torch.randn(num_tokens, H, generator=generator).to(dtype),
        "topk_weights": torch.rand(num_tokens, K, generator=generator),
        "topk_ids": ids,
    }
    call = {name: tensor.to(DEVICE) for name, tensor in call.items()}
    weights = {"w1": layer.w13_weight, "w2": layer.w2_weight, "expert_map": None}
    return call | weights | {"apply_router_weight_on_input": False} | changes


def two_layers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, CachedFusedExperts]]:
    """In a lane, the first guesses by its lift table: module, experts, cache of each."""
    monkeypatch.setattr(prefetching, "spans_layers", lambda: True)  # asks vLLM
    lane, made = None, []
    for _ in range(2):
        layer = make_layer()
        experts = TritonLikeExperts(layer.w2_bias)
        parameters = per_expert_parameters(layer, experts, E)
        tensors = {name: p.data for name, p in parameters.items()}
        store = CPUBackingStore.from_tensors(tensors, pin=DEVICE == "cuda")
        lane = lane or PrefetchLane(store.layout, 16, torch.device(DEVICE))
        provider = DeviceWeightProvider(store, 4, device=DEVICE, lane=lane)
        for buffer in [provider.slot_buffer, *(provider._banks.buffers if provider._banks else [])]:
            buffer.zero_()
        hide_parameters(layer, torch.device(DEVICE))
        made.append((layer, experts, CachedFusedExperts(provider, experts, parameters, "map", 8)))
    first, second = (cache.provider for _, _, cache in made)
    assert isinstance(first, DeviceWeightProvider)
    assert isinstance(second, DeviceWeightProvider)
    first.next_provider = second
    assert first.lookahead is not None
    first.lookahead.guess_by_lift(K)
    return made


@pytest.mark.interpret
@pytest.mark.parametrize("is_quantised", [False, True])
def test_layers_that_guess_by_lift_equal_the_full_kernel(
    is_quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, and prefills, which are counted alone; a router is not asked about codes."""
    layers, full = two_layers(monkeypatch), make_layer()
    reference, tokens = TritonLikeExperts(full.w2_bias), 0
    if is_quantised:
        monkeypatch.setattr(prefetching, "may_be_routed", lambda hidden: False)
        layers[0][2].guess = lambda hidden: pytest.fail("not of codes")
    second: Any = layers[1][2].provider
    for seed, num_tokens in enumerate((11, 1, 2, 1, 11, 3, 1)):
        before = second.stats.prefetches
        for layer, experts, _ in layers:
            expected, call = (make_call(module, num_tokens, seed) for module in (full, layer))
            reference.apply(**expected)
            experts.apply(**call)
            assert torch.equal(call["output"], expected["output"])
        tokens += num_tokens
        assert layers[0][2].provider.lookahead.lift.counts[-1, -1] == tokens
        assert second.stats.prefetches == before or num_tokens <= 8
    assert second.stats.prefetch_hits > 0


@pytest.mark.interpret
def test_a_router_that_gets_only_codes_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layers = two_layers(monkeypatch)
    cache = layers[0][2]
    first, second = (cache.provider.lookahead for _, _, cache in layers)
    first.lift = second._lift_before = None
    cache.guess = lambda hidden: pytest.fail("not of codes")
    monkeypatch.setattr(prefetching, "may_be_routed", lambda hidden: False)
    prefetching.warn_of_quantised_inputs.cache_clear()
    with caplog.at_level("WARNING", logger="vllm.hotexperts"):
        for seed in range(2):
            for layer, experts, _ in layers:
                experts.apply(**make_call(layer, 1, seed))
    (said,) = (r.message for r in caplog.records if "prefetch" in r.message)
    assert "take prefetch 'lift'" in said


@pytest.mark.interpret
def test_a_graph_that_ends_between_layers_neither_guesses_nor_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = two_layers(monkeypatch)
    monkeypatch.setattr(prefetching, "spans_layers", lambda: False)
    for seed in range(3):
        for layer, experts, _ in layers:
            experts.apply(**make_call(layer, 2, seed))
    first, second = (cache.provider for _, _, cache in layers)
    assert second.stats.prefetches == 0
    assert not first.lookahead.lift.counts.any()


@pytest.mark.interpret
@pytest.mark.parametrize("capacity", [1, 4, 9, 12])
def test_waves_over_a_map_equal_the_full_kernel_bit_for_bit(capacity: int) -> None:
    """Decode and prefill, single and many waves; the bias is read from the layer's parameter."""
    full = make_layer()
    reference = TritonLikeExperts(full.w2_bias)
    layer = make_layer()
    experts = TritonLikeExperts(layer.w2_bias)
    state = cached(layer, experts, capacity, "map")
    for seed, num_tokens in enumerate((1, 2, 5, 11, 1, 3)):
        call = make_call(layer, num_tokens, seed)
        expected = make_call(full, num_tokens, seed)
        reference.apply(**expected)
        experts.apply(**call)
        assert torch.equal(call["output"], expected["output"])
    assert state.provider.stats.misses > 0
    assert layer.w2_bias.data_ptr() == state.provider.slot_tensors.w2_bias.data_ptr()


@pytest.mark.interpret
@pytest.mark.parametrize("capacity", [2, 6])
def test_expert_parallel_ids_go_through_the_map(capacity: int) -> None:
    """Twelve global experts, of which this rank has the odd ones; others' pairs give nothing."""
    expert_map = torch.full((E,), -1, dtype=torch.int32, device=DEVICE)
    expert_map[1::2] = torch.arange(E // 2, dtype=torch.int32, device=DEVICE)
    full, layer = make_layer(E // 2), make_layer(E // 2)
    reference, experts = TritonLikeExperts(full.w2_bias), TritonLikeExperts(layer.w2_bias)
    state = cached(layer, experts, capacity, "map")
    state.recorded = torch.full((16, K), -1, dtype=torch.int32, device=DEVICE)
    for seed, num_tokens in enumerate((1, 4, 10)):
        call = make_call(layer, num_tokens, seed, expert_map=expert_map)
        expected = make_call(full, num_tokens, seed, expert_map=expert_map)
        reference.apply(**expected)
        experts.apply(**call)
        assert torch.equal(call["output"], expected["output"])
        assert torch.equal(state.recorded[:num_tokens], call["topk_ids"])  # global


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("capacity", [1, 4, 12])
def test_kernels_without_a_map_add_up_in_float32(capacity: int, dtype: torch.dtype) -> None:
    """Each wave's part is rounded once: two roundings at most from the full kernel's."""
    full, layer = make_layer(dtype=dtype), make_layer(dtype=dtype)
    reference, experts = CPULikeExperts(full.w2_bias), CPULikeExperts(layer.w2_bias)
    cached(layer, experts, capacity, "zero")
    rtol, atol = {torch.bfloat16: (2**-6, 2**-5), torch.float32: (1e-5, 1e-5)}[dtype]
    for seed, num_tokens in enumerate((1, 3, 11)):
        call, expected = (make_call(of, num_tokens, seed, dtype=dtype) for of in (layer, full))
        reference.apply(**expected)
        experts.apply(**call)
        if capacity == E:
            assert torch.equal(call["output"], expected["output"])
        torch.testing.assert_close(call["output"], expected["output"], rtol=rtol, atol=atol)


@pytest.mark.parametrize("is_weighted_before", [False, True])
@pytest.mark.parametrize("capacity", [1, 2, 6])
def test_kernels_without_a_map_serve_this_ranks_pairs_alone(
    capacity: int, is_weighted_before: bool
) -> None:
    """Expert parallel, and one expert a token whose weight is in its input already."""
    expert_map = torch.full((E,), -1, dtype=torch.int32, device=DEVICE)
    expert_map[1::2] = torch.arange(E // 2, dtype=torch.int32, device=DEVICE)
    full, layer = make_layer(E // 2, torch.float32), make_layer(E // 2, torch.float32)
    reference, experts = CPULikeExperts(full.w2_bias), CPULikeExperts(layer.w2_bias)
    cached(layer, experts, capacity, "zero")
    changes = {"dtype": torch.float32, "expert_map": expert_map}
    changes["apply_router_weight_on_input"] = is_weighted_before
    for seed, num_tokens in enumerate((1, 4, 10)):
        call, expected = (make_call(of, num_tokens, seed, **changes) for of in (layer, full))
        if is_weighted_before:
            for one in (call, expected):
                one["topk_ids"] = one["topk_ids"][:, :1].contiguous()
                one["topk_weights"] = torch.ones_like(one["topk_weights"][:, :1])
        reference.apply(**expected)
        experts.apply(**call)
        torch.testing.assert_close(call["output"], expected["output"], rtol=1e-5, atol=1e-5)


def test_an_unknown_tensor_refuses_the_layer_by_name() -> None:
    layer = make_layer()
    layer.register_buffer("strange", torch.zeros(E, 3))
    experts = TritonLikeExperts(layer.w2_bias)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0.*a tensor strange of shape"):
        per_expert_parameters(layer, experts, E)
    layer = make_layer()
    experts = TritonLikeExperts(torch.zeros(E, H))
    with pytest.raises(UnsupportedModelError, match=r"TritonLikeExperts\.bias of shape \[12, 8\]"):
        per_expert_parameters(layer, experts, E)
    scale = SimpleNamespace(scale=torch.ones(E))
    experts = TritonLikeExperts(layer.w2_bias)
    experts.quant_config = SimpleNamespace(_w1=scale)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModelError, match=r"quant_config\._w1\.scale"):
        per_expert_parameters(layer, experts, E)


class Method:
    """vLLM's quantisation method as far as the self-test runs it."""

    def __init__(self, experts: TritonLikeExperts) -> None:
        self.experts = experts
        self.moe_kernel = SimpleNamespace(fused_experts=experts)

    def apply(self, **call: Any) -> torch.Tensor:
        layer, hidden = call["layer"], call["x"]
        output = torch.empty_like(hidden)
        weights = {"w1": layer.w13_weight, "w2": layer.w2_weight, "expert_map": None}
        routing = {name: call[name] for name in ("topk_weights", "topk_ids")}
        routing["apply_router_weight_on_input"] = False
        self.experts.apply(output=output, hidden_states=hidden, **routing, **weights)
        return output


@pytest.mark.interpret
@pytest.mark.parametrize("is_broken", [False, True])
def test_the_self_test_tells_rows_apart(is_broken: bool) -> None:
    layer = make_layer()
    layer.global_num_experts, layer.top_k, layer.hidden_size = E, K, H
    layer.moe_config = SimpleNamespace(in_dtype=torch.bfloat16)
    experts = TritonLikeExperts(layer.w2_bias)
    test = SelfTest(layer, Method(experts), prefill_tokens=8)
    state = cached(layer, experts, 4, "map")
    if not is_broken:
        test.check()
        return
    rows = state.provider.store.rows  # type: ignore[attr-defined]
    rows[[7, 8]] = rows[[8, 7]].clone()
    with pytest.raises(
        UnsupportedModelError, match=r"self-test of model.layers.0.*of (8|9) tokens"
    ):
        test.check()


def test_a_scale_for_all_activations_may_round_otherwise_in_waves() -> None:
    values = {"quant_dtype": torch.float8_e4m3fn, "a2_scale": None}
    values |= {"per_act_token_quant": False, "block_shape": None}
    of = lambda **changes: SimpleNamespace(quant_config=SimpleNamespace(**values | changes))  # noqa: E731
    assert has_shared_scale(of())
    assert not has_shared_scale(of(quant_dtype=None))
    assert not has_shared_scale(of(a2_scale=torch.ones(1)))
    assert not has_shared_scale(of(per_act_token_quant=True))
    assert not has_shared_scale(of(block_shape=[128, 128]))
    assert not has_shared_scale(object())


def test_quantised_layers_are_tested_unless_the_user_says_no() -> None:
    layer = make_layer()
    layer.moe_config = SimpleNamespace()
    plain = dict(layer.named_parameters())
    packed = plain | {"w13_qweight": torch.zeros(E, 2, dtype=torch.int32)}
    assert not is_wanted(None, layer, plain)
    assert is_wanted(None, layer, packed)
    assert is_wanted(True, layer, plain)
    assert not is_wanted(False, layer, packed)
    parallel = SimpleNamespace(use_all2all_kernels=True)
    layer.moe_config = SimpleNamespace(moe_parallel_config=parallel)
    assert not is_wanted(True, layer, packed)
