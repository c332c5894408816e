"""A Transformers model whose cache the device manages: the same tokens as managed by the host."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hotexperts.transformers as hot
from hotexperts.cache import packed_store
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.errors import ConfigError, UnsupportedModelError
from hotexperts.integrations.transformers import compat
from hotexperts.integrations.transformers.prefetching import NextExperts
from hotexperts.kernels.gather.packed12 import Packed12
from hotexperts.kernels.plan import Counter
from integrations import zoo

pytest.importorskip("triton")
pytestmark = [pytest.mark.transformers, pytest.mark.interpret]
LOADING = importlib.import_module("hotexperts.integrations.transformers.load")
DEVICE = "cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"))


def load(path: Path, size: int, mode: str, **options: Any) -> Any:
    return hot.load(path, expert_cache_size=size, cache_mode=mode, device=DEVICE, **options)


@pytest.mark.parametrize(("size", "policy"), [(1, "lru"), (3, "adv"), (8, "lfu")])
def test_device_equals_host(size: int, policy: str, checkpoint: Path) -> None:
    """Prefill, decode and counters; one slot streams every second expert."""
    prompt = zoo.sample_ids(batch=1, length=6).to(DEVICE)
    found = {}
    for mode in ("host", "device"):
        model = load(checkpoint, size, mode, policy=policy, experts_algorithm="batched_mm")
        with torch.no_grad():
            logits = model(zoo.sample_ids().to(DEVICE)).logits
        tokens = model.generate(prompt, max_new_tokens=3, do_sample=False)
        found[mode] = logits, tokens, model.expert_cache
    assert torch.equal(found["device"][0], found["host"][0])
    assert torch.equal(found["device"][1], found["host"][1])
    assert found["device"][2].mode == "device"
    assert found["device"][2].stats.misses > 0


@pytest.mark.parametrize("algorithm", ["batched_mm", "grouped_mm"])
def test_picked_pairs_equal_masked_ones(
    algorithm: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host waits, a wave computes with its own pairs; under capture it masks others'."""
    found = []
    for may_wait in (True, False):
        monkeypatch.setattr(DeviceWeightProvider, "_host_may_wait", lambda self, it=may_wait: it)
        model = load(checkpoint, 3, "device", experts_algorithm=algorithm)
        with torch.no_grad():
            found.append(model(zoo.sample_ids(length=70).to(DEVICE)).logits)
    assert torch.equal(found[0], found[1])


def test_a_mode_that_cannot_work_is_refused_before_loading(checkpoint: Path) -> None:
    for options, message in (
        ({"cache_mode": "gpu"}, "use 'auto', 'host' or 'device'"),
        ({"cache_mode": "device", "expert_store": "file"}, "use expert_store 'ram'"),
        ({"cache_mode": "device", "policy": "slru"}, "policy 'slru' has no kernel"),
    ):
        with pytest.raises(ConfigError, match=message):
            hot.load(checkpoint, expert_cache_size=2, device="cpu", **options)


def test_auto_is_the_host_without_a_gpu_and_says_why(checkpoint: Path) -> None:
    """The interpreter is there, as for every test of this file, but it must be asked for."""
    for store, cause in (("ram", "no CUDA device"), ("file", "experts stay in the file")):
        cache = hot.load(
            checkpoint, expert_cache_size=2, expert_store=store, device="cpu"
        ).expert_cache
        assert (cache.mode, cache.mode_reason) == ("host", f"host: {cause}")
        assert not any(provider.is_capturable for provider in cache.providers)
    cache = hot.attach(zoo.build_model("olmoe"), expert_cache_size=2, device="cpu").expert_cache
    assert (cache.mode, cache.mode_reason) == ("host", "host: no CUDA device")


@pytest.mark.gpu
def test_auto_is_the_device_on_a_gpu(checkpoint: Path) -> None:
    cache = hot.load(checkpoint, expert_cache_size=2, device="cuda").expert_cache
    assert (cache.mode, cache.mode_reason) == ("device", None)
    assert all(provider.is_capturable for provider in cache.providers)


def test_generate_makes_no_cuda_graphs_of_what_the_host_manages(checkpoint: Path) -> None:
    """Whichever door the model came through, and whatever settings its folder holds."""
    disabled = {}
    for mode in ("auto", "host", "device"):
        models = [load(checkpoint, 2, mode, policy="lru")]
        options = {"cache_mode": mode, "policy": "lru", "device": DEVICE}
        models.append(hot.attach(zoo.build_model("olmoe"), **options))
        for model in models:
            prompt = zoo.sample_ids(batch=1, length=1).to(DEVICE)
            model.generate(prompt, max_new_tokens=2, do_sample=False)
            found = bool(model.generation_config.disable_compile)
            disabled.setdefault(model.expert_cache.mode, set()).add(found)
    assert disabled == {"host": {True}, "device": {False}}


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["lru", "adv"])
def test_a_captured_decode_step_equals_the_eager_one(policy: str, checkpoint: Path) -> None:
    """One CUDA graph for the whole forward, replayed with a static KV cache."""
    from transformers import StaticCache

    options = {"policy": policy, "experts_algorithm": "batched_mm"}
    model, eager = (load(checkpoint, 3, "device", **options) for _ in range(2))
    prompt = zoo.sample_ids(batch=1, length=6).to(DEVICE)

    def start(of: Any, kv: Any) -> torch.Tensor:
        return of(prompt, past_key_values=kv).logits[:, -1:].argmax(-1)

    with torch.no_grad():
        kv = StaticCache(config=model.config, max_cache_len=32)
        token = start(model, kv)
        first = token.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm-up, as every capture needs
            model(token, past_key_values=kv)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            token.copy_(model(token, past_key_values=kv).logits[:, -1:].argmax(-1))
        for layer in kv.layers:
            layer.keys.zero_()
            layer.values.zero_()
            layer.cumulative_length.zero_()
        model.expert_cache.reset()
        token.copy_(start(model, kv))
        assert torch.equal(token, first)
        found = []
        for _ in range(16):
            graph.replay()
            found.append(int(token))
        kv = StaticCache(config=eager.config, max_cache_len=32)
        token, expected = start(eager, kv), []
        for _ in range(16):
            token = eager(token, past_key_values=kv).logits[:, -1:].argmax(-1)
            expected.append(int(token))
    assert found == expected
    assert model.expert_cache.stats == eager.expert_cache.stats


def test_packed_experts_give_the_same_tokens(checkpoint: Path, monkeypatch: Any) -> None:
    """Slots hold what the file holds; here even tiny tensors are packed."""
    monkeypatch.setattr(
        packed_store, "_packing_that_pays", lambda nbytes, base, n: Packed12(base, 128)
    )
    prompt = zoo.sample_ids(batch=1, length=70).to(DEVICE)
    found = {}
    for packing, mode in (("none", "host"), ("packed12", "device")):
        options = {"expert_packing": packing, "experts_algorithm": "batched_mm", "policy": "lru"}
        model = load(checkpoint, 3, mode, dtype="bfloat16", **options)
        cache = model.expert_cache
        assert (cache.packing, cache.mode) == (packing, mode)
        found[packing] = model.generate(prompt, max_new_tokens=3, do_sample=False)
        moved = cache.stats.bytes_moved
        assert moved % cache.providers[0].store.form.nbytes == 0
        attached = zoo.build_model("olmoe").bfloat16()
        hot.attach(
            attached,
            expert_cache_size=3,
            cache_mode=mode,
            device=DEVICE,
            **options,
        )
        found[packing, "attached"] = attached(prompt).logits.detach()
    assert torch.equal(found["none"], found["packed12"])
    assert torch.equal(found["none", "attached"], found["packed12", "attached"])


def test_packing_that_cannot_work_is_refused(checkpoint: Path) -> None:
    for options, message in (
        ({"expert_packing": "zip"}, "expert_packing is 'zip': use 'auto', 'none' or 'packed12'"),
        (
            {"cache_mode": "host"},
            "does not work with cache_mode 'host': use cache_mode 'auto', or expert_packing 'auto'",
        ),
        (
            {"expert_store": "file"},
            "does not work with expert_store 'file': use expert_store 'ram'",
        ),
        ({"policy": "slru"}, r"\(host: policy 'slru' has no kernel\): use expert_packing 'auto'"),
        (
            {"cache_mode": "device", "dtype": "float32"},
            "packs bfloat16, and the experts here are float32: use expert_packing 'none'",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            hot.load(checkpoint, **{"expert_packing": "packed12", "device": "cpu"} | options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"policy": "slru"}, "host: policy 'slru' has no kernel"),
        ({"cache_mode": "host"}, "cache_mode host"),
        ({"expert_store": "file"}, "host: experts stay in the file"),
    ],
)
def test_a_prefetch_without_kernels_is_refused_before_anything_is_read(
    options: dict[str, Any], reason: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOADING, "take_parameters", None)
    with pytest.raises(ConfigError, match=rf"do not work here \({reason}\): use prefetch 'off'"):
        hot.load(checkpoint, prefetch="router", device="cpu", expert_cache_size=2, **options)


def test_a_prefetch_without_a_router_is_refused_before_anything_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "router_kinds", lambda model: [])
    monkeypatch.setattr(LOADING, "take_parameters", None)
    with pytest.raises(UnsupportedModelError, match=r"does not say where .*: use prefetch='off'"):
        load(checkpoint, 2, "device", prefetch="router")


def test_an_attach_that_is_refused_leaves_the_model_as_it_was(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        expected = model(zoo.sample_ids()).logits
    for options in ({"prefetch": "router"}, {"expert_packing": "packed12"}):
        with pytest.raises(ConfigError, match="do not work here"):
            hot.attach(model, expert_cache_size=2, device="cpu", policy="slru", **options)
        with torch.no_grad():
            assert torch.equal(model(zoo.sample_ids()).logits, expected)


def test_auto_packs_only_where_kernels_copy(checkpoint: Path) -> None:
    for size, mode in ((2, "host"), (2, "auto"), (2, "device")):  # a CPU has no link
        cache = load(checkpoint, size, mode, expert_packing="auto").expert_cache
        assert cache.packing == "none"  # of tensors as small as these, on a GPU too


def test_prefetching_changes_no_token(checkpoint: Path) -> None:
    prompt = zoo.sample_ids(batch=1, length=6).to(DEVICE)
    found = {}
    for prefetch in ("off", "router"):
        model = load(checkpoint, 3, "device", prefetch=prefetch)
        found[prefetch] = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(found["off"], found["router"])
    first, second = model.expert_cache.providers[:2]
    assert not any(first.kernel.counters[Counter.AHEAD :].tolist())
    issued, _, used, _ = second.kernel.counters[Counter.AHEAD :].tolist()
    assert issued >= used > 0


def test_the_next_router_guesses_by_its_own_norm(checkpoint: Path) -> None:
    """By hand: the input without this norm's weights, with the next one's, through its router."""
    model = load(checkpoint, 3, "device", prefetch="router", dtype="float32")
    layers = model.model.layers
    with torch.no_grad():
        for layer in layers:
            layer.post_attention_layernorm.weight.uniform_(0.5, 2)
    guess = NextExperts(model, layers[0].mlp.experts, layers[1].mlp.experts)
    plain = torch.randn(5, model.config.hidden_size, device=DEVICE)
    found = guess(plain * layers[0].post_attention_layernorm.weight)
    logits = plain * layers[1].post_attention_layernorm.weight @ layers[1].mlp.gate.weight.T
    assert torch.allclose(found, logits, atol=1e-5)


def test_a_prefetch_that_cannot_work_is_refused(checkpoint: Path) -> None:
    for options, message in (
        ({"prefetch": "always"}, "prefetch is 'always': use 'off' or 'router'"),
        ({"cache_mode": "host"}, r"\(cache_mode host\): use prefetch 'off'"),
        ({"policy": "slru"}, r"\(host: policy 'slru' has no kernel\): use prefetch 'off'"),
    ):
        with pytest.raises(ConfigError, match=message):
            hot.load(checkpoint, **{"prefetch": "router", "device": "cpu"} | options)
