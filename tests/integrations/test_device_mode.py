"""A Transformers model whose cache the device manages: the same tokens as managed by the host."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter

import hotexperts.transformers as hot
from hotexperts import sizing
from hotexperts.cache import packed_store
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.errors import ConfigError
from hotexperts.integrations.transformers import build, compat
from hotexperts.integrations.transformers.experts import _capturable_op
from hotexperts.integrations.transformers.prefetching import NextExperts
from hotexperts.integrations.transformers.recording import RoutingRecorder
from hotexperts.kernels.gather.packed12 import Packed12
from hotexperts.kernels.plan import Counter
from hotexperts.predict.cross_lift import CrossLift
from hotexperts.sizing import SizePlan
from integrations import zoo

pytest.importorskip("triton")
pytestmark = [pytest.mark.transformers, pytest.mark.interpret]
LOADING = importlib.import_module("hotexperts.integrations.transformers.load")
DEVICE = "cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"))


def load(path: Path, size: int | str, mode: str, **options: Any) -> Any:
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
    for prefetch in ("off", "router", "lift"):
        model = load(checkpoint, 3, "device", prefetch=prefetch)
        found[prefetch] = model.generate(prompt, max_new_tokens=6, do_sample=False)
        assert torch.equal(found["off"], found[prefetch])
        first, second = model.expert_cache.providers[:2]
        assert not any(first.kernel.counters[Counter.AHEAD :].tolist())
        issued, _, used, _ = second.kernel.counters[Counter.AHEAD :].tolist()
        assert issued >= used > 0 or prefetch == "off"
        assert (model.expert_cache.lift_nbytes > 0) == (prefetch == "lift")


def without_routers(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(compat, "router_kinds", lambda model: [])
    return "does not say where the router logits"


def routers_that_want_more(monkeypatch: pytest.MonkeyPatch) -> str:
    original = OlmoeTopKRouter.forward
    more = lambda self, hidden_states, bias=None: original(self, hidden_states)  # noqa: E731
    monkeypatch.setattr(OlmoeTopKRouter, "forward", more)
    return "gives more than hidden states to the router of model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("prefetch", "lacking"),
    [
        ("off", None),
        ("lift", None),
        ("router", None),
        ("router", without_routers),
        ("router", routers_that_want_more),
    ],
)
def test_a_budget_counts_just_what_prefetches_take(
    prefetch: str, lacking: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking is not None:
        lacking(monkeypatch)
    counted: list[int] = []

    def capacity_for_budget(*args: Any, prefetch_bytes: int) -> SizePlan:
        counted.append(prefetch_bytes)
        return sizing.capacity_for_budget(*args, prefetch_bytes=prefetch_bytes)

    monkeypatch.setattr(build, "capacity_for_budget", capacity_for_budget)
    model = load(checkpoint, "1GiB", "device", prefetch=prefetch)
    cache = model.expert_cache
    lanes = {p.lookahead.lane for p in cache.providers if p.lookahead is not None}
    scales = (len(cache.providers) - 1) * model.config.hidden_size * model.dtype.itemsize
    taken = sum(lane.nbytes for lane in lanes) + cache.lift_nbytes
    taken += scales if prefetch == "router" and lacking is None else 0
    assert counted == [taken]
    assert (cache.lift_nbytes > 0) == (prefetch == "lift" or lacking is not None)
    assert (taken > 0) == (prefetch != "off")
    assert ("workspace, prefetch)" in cache.reason) == (prefetch != "off")


@pytest.mark.parametrize("lacking", [without_routers, routers_that_want_more])
def test_where_no_router_guesses_the_lift_table_does_and_says_so(
    lacking: Any,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reason = lacking(monkeypatch)
    model = load(checkpoint, 3, "device", prefetch="router")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "prefetch 'router' guesses by 'lift'" in record.message
    assert reason in record.message
    first = model.model.layers[0].mlp.experts._hotexperts
    assert first.guess is None
    assert first.provider.lookahead.lift is not None
    model.generate(zoo.sample_ids(batch=1, length=6).to(DEVICE), max_new_tokens=6, do_sample=False)
    assert model.expert_cache.stats.prefetches


def test_lift_is_a_choice_that_says_nothing(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(checkpoint, 3, "device", prefetch="lift")
    assert not caplog.records
    first, last = (layer.mlp.experts._hotexperts for layer in model.model.layers)
    assert first.guess is last.guess is None
    assert first.provider.lookahead.lift is not None
    assert last.provider.lookahead.lift is None, "nobody comes after it"


@torch.no_grad()
def test_what_a_model_asked_for_is_counted_until_a_reset(checkpoint: Path) -> None:
    """A prefill of 70 tokens and a step of decode: the specification on the recorded ids."""
    model = load(checkpoint, 3, "device", prefetch="lift")
    table = model.expert_cache.providers[0].lookahead.lift
    fresh = table.rows.clone()
    spec = CrossLift(2, zoo.NUM_EXPERTS, zoo.TOP_K)
    tokens = zoo.sample_ids(batch=1, length=71).to(DEVICE)
    with RoutingRecorder(model) as recorder:
        seen = model(input_ids=tokens[:, :-1], use_cache=True)
        assert not model.expert_cache.stats.prefetches, "a prefill guesses nothing"
        model(input_ids=tokens[:, -1:], past_key_values=seen.past_key_values)
        found = recorder.take()
    assert found is not None
    for ids in found.ids.tolist():
        for layer in (0, 1):
            spec.observe(layer, ids[layer])
    assert table.counts[-1, -1] == 71
    assert torch.equal(table.counts[:-1, :-1].cpu(), torch.from_numpy(spec.together[1]))
    model.expert_cache.reset_stats()
    assert table.counts[-1, -1] == 71
    model.expert_cache.reset()
    assert torch.equal(table.rows, fresh)


@torch.no_grad()
def test_compiled_code_may_overwrite_ids_that_are_counted_later(checkpoint: Path) -> None:
    """As Inductor does with buffers that nobody needs: the operator's caller owns them."""
    model = load(checkpoint, 3, "device", prefetch="lift")
    first, last = (layer.mlp.experts._hotexperts for layer in model.model.layers)
    hidden = torch.randn(2, zoo.HIDDEN_SIZE, dtype=model.dtype, device=DEVICE)
    weights = torch.ones(2, 2, device=DEVICE)
    ids = torch.tensor([[0, 1], [2, 3]], device=DEVICE)
    _capturable_op(hidden, ids, weights, first.key)
    ids.fill_(7)
    _capturable_op(hidden, torch.tensor([[4, 5], [4, 6]], device=DEVICE), weights, last.key)
    counts = first.provider.lookahead.lift.counts
    assert counts[:-1, -1].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert counts[0, 4:7].tolist() == [1, 1, 0]


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
        ({"prefetch": "always"}, "prefetch is 'always': use 'off', 'router' or 'lift'"),
        ({"cache_mode": "host"}, r"\(cache_mode host\): use prefetch 'off'"),
        ({"policy": "slru"}, r"\(host: policy 'slru' has no kernel\): use prefetch 'off'"),
    ):
        with pytest.raises(ConfigError, match=message):
            hot.load(checkpoint, **{"prefetch": "router", "device": "cpu"} | options)
