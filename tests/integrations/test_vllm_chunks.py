"""Layers that are repacked in parts, on stand-ins of vLLM's layer and methods."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hotexperts.cache import CPUBackingStore
from hotexperts.errors import ConfigError, UnsupportedModelError
from hotexperts.integrations.vllm import loading, options
from hotexperts.integrations.vllm.caches import ModelCaches
from hotexperts.integrations.vllm.chunks import repack_in_parts
from hotexperts.integrations.vllm.loading import PEAK_OF_QUANTISED, experts_at_once, peak_nbytes
from hotexperts.integrations.vllm.weights import per_expert_parameters

E, N, H = 11, 6, 4
CPU = torch.device("cpu")


class TritonExperts:
    """Holds what vLLM's does: scales of its weights, and one of activations."""

    def __init__(self, layer: Any) -> None:
        self.w1_scale, self.a1_scale = layer.w13_scale, layer.w13_input_scale

    def apply(self, **call: Any) -> None:
        raise NotImplementedError

    def moe_sum(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        raise NotImplementedError


class Method:
    """Repacks: turns each expert's matrix, quantises it by its own largest number."""

    num_experts = 0

    def __init__(self) -> None:
        self.num_experts = E
        self.moe_kernel: Any = None
        self.most_nbytes = [0]

    def process(self, layer: Any) -> None:
        assert len(layer.w13_weight) == layer.local_num_experts == self.num_experts
        assert self.moe_kernel is None, "a fresh layer, not an update"
        loaded = layer.w13_weight.data
        scale = loaded.abs().amax((1, 2)) / 127
        repacked = (loaded / scale[:, None, None]).round().to(torch.int8).transpose(1, 2)
        self.most_nbytes[0] = max(self.most_nbytes[0], loaded.nbytes + repacked.nbytes)
        loaded.zero_()  # in place, as some do
        layer.w13_weight = nn.Parameter(repacked.contiguous(), requires_grad=False)
        layer.register_parameter("w13_scale", nn.Parameter(scale, requires_grad=False))
        shared = self.shared(layer)
        layer.w13_input_scale = nn.Parameter(shared, requires_grad=False)
        self.moe_kernel = SimpleNamespace(fused_experts=TritonExperts(layer))

    def shared(self, layer: Any) -> torch.Tensor:
        return layer.w13_input_scale.data * 2


def method_named(name: str, **methods: Callable[..., Any]) -> Any:
    return type(name, (Method,), methods)()


def make_layer() -> Any:
    generator = torch.Generator().manual_seed(0)
    layer: Any = nn.Module()
    tensors = {
        "w13_weight": torch.randn(E, N, H, generator=generator),
        "w2_weight": torch.randn(E, H, N, generator=generator),
        "w13_input_scale": torch.tensor(0.5),
    }
    for name, tensor in tensors.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    layer.w2_weight.weight_loader = "vLLM's"
    layer.layer_name, layer.local_num_experts, layer.num_experts = "model.layers.0", E, E
    layer.top_k = 1
    return layer


def whole() -> CPUBackingStore:
    """What a layer is when it is repacked as vLLM does it."""
    layer, method = make_layer(), Method()
    method.process(layer)
    parameters = per_expert_parameters(layer, method.moe_kernel.fused_experts, E)
    tensors = {name: p.data for name, p in parameters.items()}
    return CPUBackingStore.from_tensors(tensors, pin=False)


@pytest.mark.parametrize("at_once", [3, 4, 6, 11])
def test_parts_are_the_whole_bit_for_bit(at_once: int) -> None:
    layer, method = make_layer(), method_named("Fp8MoEMethod")
    loaded = layer.w13_weight.data
    before = loaded.clone()
    found = repack_in_parts(layer, method, method.process, at_once, CPU, pin=False)
    expected = whole()
    assert found.store.layout == expected.layout
    assert torch.equal(found.store.rows, expected.rows)
    assert torch.equal(loaded, before), "a part is a copy: its repacking is in place"
    assert method.most_nbytes[0] == at_once * N * H * (4 + 1)
    experts = method.moe_kernel.fused_experts
    assert experts.w1_scale is found.parameters["w13_scale"]
    assert experts.a1_scale == 1.0
    assert len(found.parameters["w13_weight"]) == len(loading.parts(E, at_once)[-1])
    assert layer.w2_weight.weight_loader == "vLLM's"
    assert layer.local_num_experts == layer.num_experts == method.num_experts == E


def test_one_part_at_a_time_is_on_the_device() -> None:
    """The room is reckoned for one part and its rows: nothing may hold the part before."""
    layer, parts_made = make_layer(), list[weakref.ref[torch.Tensor]]()

    def process(self: Method, layer: Any) -> None:
        gc.collect()
        assert all(made() is None for made in parts_made)
        Method.process(self, layer)
        parts_made.append(weakref.ref(layer.w13_weight))

    method = method_named("Fp8MoEMethod", process=process)
    repack_in_parts(layer, method, method.process, 4, CPU, pin=False)
    assert len(parts_made) == 3


def test_a_method_that_nobody_read_is_refused() -> None:
    layer, method = make_layer(), method_named("NewMoEMethod")
    with pytest.raises(UnsupportedModelError, match=r"NewMoEMethod is not known to.*larger GPU"):
        repack_in_parts(layer, method, method.process, 4, CPU, pin=False)
    assert len(layer.w13_weight) == E


def test_a_tensor_of_all_experts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(self: Any, layer: Any) -> torch.Tensor:
        return layer.w13_scale.data.max()

    layer, method = make_layer(), method_named("Fp8MoEMethod", shared=shared)
    message = r"makes TritonExperts.a1_scale, w13_input_scale of all experts together.*larger GPU"
    with pytest.raises(UnsupportedModelError, match=message):
        repack_in_parts(layer, method, method.process, 4, CPU, pin=False)


def test_a_gpu_that_holds_no_part_is_told_with_the_remedy() -> None:
    def full(layer: Any) -> None:
        raise torch.OutOfMemoryError

    layer, method = make_layer(), method_named("Fp8MoEMethod")
    message = r"no room to repack 3 experts.*1.13 KiB: free GPU memory"
    with pytest.raises(ConfigError, match=message):
        repack_in_parts(layer, method, full, 4, CPU, pin=False)


def test_as_many_at_once_as_fit() -> None:
    assert experts_at_once(128, 3000, 3000) == 128
    assert experts_at_once(128, 3000, 2999) == 64  # two parts of one size, not 127 and 1
    assert experts_at_once(128, 3000, 999) == 32  # as 42 would need four parts, too
    assert experts_at_once(8, 3000, 0) == 3
    assert experts_at_once(3, 3000, 0) == 3
    for num_experts in range(1, 70):
        for free in range(0, 3100, 50):
            at_once = experts_at_once(num_experts, 3000, free)
            sizes = [len(part) for part in loading.parts(num_experts, at_once)]
            assert sum(sizes) == num_experts
            assert max(sizes) == at_once
            assert min(sizes) > 1 or num_experts == 1
            assert at_once <= 3 or 3000 * at_once <= free * num_experts


def test_what_repacking_takes_at_most() -> None:
    layer = make_layer()
    assert peak_nbytes(layer) == 2 * 2116
    layer.w13_scale = nn.Parameter(torch.zeros(E, dtype=torch.uint8), requires_grad=False)
    assert peak_nbytes(layer) == 3 * (2116 + E)


def test_free_memory_is_what_this_process_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "mem_get_info": (500, 1000),
        "memory_allocated": 200,
        "memory_reserved": 300,
        "get_per_process_memory_fraction": 1.0,
    }
    asked: list[torch.device] = []

    def answer(value: Any) -> Any:
        return lambda device: (asked.append(device), value)[1]

    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, answer(value))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert loading.free_nbytes(torch.device("cuda")) == 600
    assert {str(device) for device in asked} == {"cuda:1"}, "some of them refuse one without number"
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    assert loading.free_nbytes(torch.device("cuda")) == 300


@pytest.mark.parametrize(("num_free", "is_whole"), [(2 * 2116, True), (2116, False)])
def test_a_layer_that_does_not_fit_is_not_moved(
    num_free: int, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,116 bytes: 2 x 11 x 24 numbers and a scale."""
    moved: list[Any] = []

    @contextmanager
    def device_loading_context(module: Any, target_device: torch.device) -> Iterator[Any]:
        moved.append(target_device.type)
        yield module

    module = SimpleNamespace(device_loading_context=device_loading_context)
    loading.patch_loading(module)
    monkeypatch.setattr(loading, "free_nbytes", lambda device: num_free)
    layer, caches = make_layer(), SimpleNamespace(in_parts=None)
    with module.device_loading_context(layer, torch.device("cuda")):
        assert moved == ["cuda"], "of another method, without a cache"
    layer.quant_method = SimpleNamespace(expert_caches=caches)
    with module.device_loading_context(layer, torch.device("cuda")):
        expected = None if is_whole else (torch.device("cuda"), 4)
        assert caches.in_parts == expected
        assert moved == ["cuda", "cuda"][: 1 + is_whole]
    assert caches.in_parts is None
    with module.device_loading_context(layer, CPU):
        assert moved[-1] == "cpu"
        assert caches.in_parts is None


def model_caches(**more: Any) -> ModelCaches:
    given = {"size": 5, "policy": "lru", "options": {"check_host_memory": False, **more}}
    scheduler = SimpleNamespace(max_num_batched_tokens=16)
    caches = ModelCaches(options.parse(given), SimpleNamespace(scheduler_config=scheduler))
    caches.num_expected = 1
    return caches


def test_a_cache_serves_experts_of_every_part(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    layer, method, caches = make_layer(), method_named("Fp8MoEMethod"), model_caches()
    caches.in_parts = CPU, 4
    caches.process(layer, method, method.process)
    assert "repacked 4 of 11 experts at a time" in caplog.records[0].message
    provider = caches.providers["model.layers.0"]
    assert provider.store.num_experts == E
    assert layer.w13_weight.shape == (5, H, N)
    expected = whole().tensors
    for ids in ([0, 10], [5, 7], [4, 8]):
        result = provider.prepare(torch.tensor([ids], dtype=torch.int32))
        for expert, slot in zip(ids, result.topk_ids[0].tolist(), strict=True):
            assert torch.equal(layer.w13_weight[slot], expected.w13_weight[expert])
            assert torch.equal(layer.w13_scale[slot], expected.w13_scale[expert])


def test_a_self_test_that_cannot_be_made_is_refused() -> None:
    layer, method, caches = make_layer(), method_named("Fp8MoEMethod"), model_caches(self_test=True)
    caches.in_parts = CPU, 4
    with pytest.raises(ConfigError, match=r"self_test is true, but model\.layers\.0 is too large"):
        caches.process(layer, method, method.process)


@pytest.mark.gpu
def test_the_gpu_never_holds_more_than_a_part() -> None:
    """Measured by PyTorch: 64 experts of 4 MiB, eight at a time."""
    device = torch.device("cuda")
    layer, method = make_layer(), method_named("Fp8MoEMethod")
    generator = torch.Generator().manual_seed(0)
    layer.w13_weight = nn.Parameter(torch.randn(64, 1024, 1024, generator=generator), False)
    layer.w2_weight = nn.Parameter(torch.randn(64, 8, 8, generator=generator), False)
    layer.local_num_experts = layer.num_experts = method.num_experts = 64
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = repack_in_parts(layer, method, method.process, 8, device, pin=True)
    part_nbytes = 8 * 4 << 20
    assert torch.cuda.max_memory_allocated() - before <= PEAK_OF_QUANTISED * part_nbytes + (4 << 20)
    assert found.store.rows.shape[0] == 64
