"""Cached equals resident, on every family; and what a cached model refuses to do."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hotexperts.transformers as hot
from hotexperts.cache import CPUBackingStore
from hotexperts.errors import (
    CheckpointError,
    ConcurrentUseError,
    ConfigError,
    HostMemoryError,
    HotExpertsError,
    UnknownNameError,
    UnsupportedModelError,
    UnsupportedOperationError,
)
from integrations import zoo

pytestmark = pytest.mark.transformers

# NemotronHExperts adds its experts up in float32, the other classes in the model's dtype.
EAGER_BF16_BOUND = {"nemotron_h": 0.04}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    """Tiny models on shared cores: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Family to the folder of its checkpoint, written once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = zoo.save_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


def load(path: Path, size: int | str = 2, **options: Any) -> Any:
    options = {"device": "cpu", "expert_store": "file", **options}
    return hot.load(path, expert_cache_size=size, **options)


def resident(path: Path, algorithm: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype="auto", experts_implementation=algorithm
    )


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(zoo.sample_ids()).logits


def generated(model: Any, num_tokens: int = 8) -> list[list[int]]:
    prompt = zoo.sample_ids(batch=2, length=6)
    out = model.generate(prompt, max_new_tokens=num_tokens, do_sample=False)
    return out.tolist()


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_cached_equals_resident(family: str, checkpoint: Any) -> None:
    """bf16, from the file: logits of every algorithm and size, and greedy tokens."""
    if zoo.known_exception(family):
        pytest.skip(f"{family}: {zoo.known_exception(family)}")
    path = checkpoint(family)
    for algorithm in ("eager", "grouped_mm", "batched_mm"):
        full = resident(path, algorithm)
        expected = logits(full)
        for size in (1, 3, 8):
            cached = load(path, size, experts_algorithm=algorithm)
            difference = (logits(cached) - expected).abs().max().item()
            bound = EAGER_BF16_BOUND.get(family, 0) if algorithm == "eager" else 0
            assert difference <= bound, (algorithm, size, difference)
            stats = cached.expert_cache.stats
            assert stats.misses > 0
            assert stats.calls == len(cached.expert_cache.providers)
        if algorithm == "grouped_mm":
            assert generated(load(path, 3, experts_algorithm=algorithm)) == generated(full)


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "granitemoe", "deepseek_v3"])
def test_float32_eager_is_exact_too(family: str, tmp_path: Path) -> None:
    path = zoo.save_checkpoint(family, tmp_path, dtype=torch.float32)
    expected = logits(resident(path, "eager"))
    for size in (1, 3, 8):
        assert torch.equal(logits(load(path, size, experts_algorithm="eager")), expected)


@pytest.mark.parametrize("store", ["file", "ram"])
@pytest.mark.parametrize("build", [zoo.build_fp8_checkpoint, zoo.build_mxfp4_checkpoint])
def test_quantised_checkpoints_are_dequantised_one_expert_at_a_time(
    build: Any, store: str, tmp_path: Path
) -> None:
    path = build(tmp_path)
    cached = load(path, 3, expert_store=store, experts_algorithm="eager")
    assert torch.equal(logits(cached), logits(resident(path, "eager")))


@pytest.mark.parametrize("algorithm", ["eager", "grouped_mm", "batched_mm"])
def test_llama4_through_its_adapter(algorithm: str) -> None:
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0)):
        expected = logits(zoo.build_llama4(dtype=dtype))
        cached = hot.attach(
            zoo.build_llama4(dtype=dtype),
            expert_cache_size=3,
            device="cpu",
            experts_algorithm=algorithm,
        )
        assert (logits(cached) - expected).abs().max() <= bound
        assert cached.expert_cache.stats.misses > 0


@pytest.mark.parametrize("store", ["file", "ram"])
def test_a_wrong_byte_in_one_expert_is_seen(
    store: str, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of the tests: equality above means something."""
    cached = load(checkpoint("olmoe"), 3, expert_store=store)
    expected = logits(cached)
    cached.expert_cache.reset()
    provider = cached.expert_cache.providers[0]
    copy_into = provider.store.copy_into

    def corrupt(expert: int, tensors: Any) -> None:
        copy_into(expert, tensors)
        if expert == 5:
            tensors[0].mul_(-1)

    monkeypatch.setattr(provider.store, "copy_into", corrupt)
    assert (logits(cached) - expected).abs().max() > 0.01


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "gpt_oss", "granitemoe", "minimax"])
def test_views_equal_the_general_converter(
    family: str, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast path (views of the file) against its twin, Transformers' converter."""
    path = checkpoint(family)
    fast = load(path, 8, expert_store="ram")
    module = "hotexperts.integrations.transformers.checkpoint"
    monkeypatch.setattr(f"{module}._only_stacks", lambda converter: False)
    slow = load(path, 8, expert_store="ram")
    for a, b in zip(fast.expert_cache.providers, slow.expert_cache.providers, strict=True):
        assert torch.equal(a.store.rows, b.store.rows)


def test_experts_are_not_read_by_transformers(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of an expert exists before a token asks for it, and none is a parameter."""
    cached = load(checkpoint("olmoe"), 2)
    assert not [n for n, _ in cached.named_parameters() if "experts." in n]
    assert cached.expert_cache.host_nbytes == 0
    assert all(not p.slots.residency.residents for p in cached.expert_cache.providers)


def test_ram_store_holds_every_row_once(checkpoint: Any) -> None:
    cache = load(checkpoint("olmoe"), 2, expert_store="ram").expert_cache
    rows = sum(p.store.num_experts * p.store.layout.row_nbytes for p in cache.providers)
    assert cache.host_nbytes == rows


def test_progress_counts_every_expert(checkpoint: Any) -> None:
    seen: list[tuple[int, int]] = []
    load(checkpoint("olmoe"), 2, expert_store="ram", progress=lambda *step: seen.append(step))
    assert seen == [(i, 16) for i in range(1, 17)]


def test_attach_to_a_loaded_model(checkpoint: Any) -> None:
    full = resident(checkpoint("olmoe"), "grouped_mm")
    expected = logits(full)
    cached = hot.attach(full, expert_cache_size=3, device="cpu")
    assert cached is full
    assert torch.equal(logits(cached), expected)
    with pytest.raises(UnsupportedOperationError, match="has an expert cache already"):
        hot.attach(cached, expert_cache_size=3, device="cpu")


def test_install_serves_plain_from_pretrained(checkpoint: Any) -> None:
    hot.install(expert_cache_size=3, expert_store="file")
    path = checkpoint("olmoe")
    cached = AutoModelForCausalLM.from_pretrained(
        path, dtype="auto", experts_implementation="hotexperts"
    )
    assert cached.expert_cache.capacity == 3
    plain = resident(path, "grouped_mm")
    assert not hasattr(plain, "expert_cache")
    assert torch.equal(logits(cached), logits(plain))


def test_static_cache_and_compile_in_one_graph(checkpoint: Any) -> None:
    """The experts are one opaque operator: `fullgraph=True` holds."""
    cached = load(checkpoint("olmoe"), 3)
    expected = generated(cached)
    prompt = zoo.sample_ids(batch=2, length=6)
    static = cached.generate(
        prompt, max_new_tokens=8, do_sample=False, cache_implementation="static"
    )
    assert static.tolist() == expected
    compiled = torch.compile(cached.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(prompt).logits, cached(prompt).logits)


def test_two_threads_in_one_model_are_an_error(checkpoint: Any) -> None:
    cached = load(checkpoint("olmoe"), 2)
    provider = cached.expert_cache.providers[0]
    inside, leave = threading.Event(), threading.Event()
    copy_into = provider.store.copy_into

    def slow(expert: int, tensors: Any) -> None:
        inside.set()
        leave.wait(10)
        copy_into(expert, tensors)

    provider.store.copy_into = slow
    thread = threading.Thread(target=lambda: logits(cached))
    thread.start()
    inside.wait(10)
    with pytest.raises(ConcurrentUseError, match="two threads"):
        logits(cached)
    leave.set()
    thread.join()


REFUSALS = {
    "save": (lambda m, p: m.save_pretrained(p), "without its experts"),
    "to": (lambda m, p: m.to(torch.float32), "slots stay where they are"),
    "half": (lambda m, p: m.half(), "slots stay where they are"),
    "submodule": (lambda m, p: m.model.layers[0].mlp.experts.double(), "slots stay where"),
    "train": (lambda m, p: m.train(), "not parameters"),
    "adapter": (lambda m, p: m.add_adapter(None), "load without an expert cache"),
    "gradients": (
        lambda m, p: m(inputs_embeds=torch.randn(1, 4, 64, dtype=m.dtype, requires_grad=True)),
        "gradients through cached experts",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_would_break_in_silence_is_refused(name: str, checkpoint: Any, tmp_path: Path) -> None:
    cached = load(checkpoint("olmoe"), 2)
    expected = logits(cached)
    do, message = REFUSALS[name]
    with pytest.raises(UnsupportedOperationError, match=message):
        do(cached, tmp_path)
    assert not list(tmp_path.iterdir())
    assert torch.equal(logits(cached), expected)  # and nothing has changed


def test_moves_that_change_nothing_are_allowed(checkpoint: Any) -> None:
    cached = load(checkpoint("olmoe"), 2)
    assert cached.to("cpu").to(torch.bfloat16).eval() is cached


def test_an_implementation_without_a_cache_says_so(checkpoint: Any) -> None:
    plain = resident(checkpoint("olmoe"), "eager")
    hot.install()
    plain.set_experts_implementation("hotexperts")
    with pytest.raises(UnsupportedOperationError, match="OlmoeExperts has no expert cache"):
        logits(plain)


BAD_OPTIONS = {
    "zero": ({"size": 0}, ConfigError, "at least 1 slot"),
    "negative": ({"size": -2}, ConfigError, "at least 1 slot"),
    "above": ({"size": 9}, ConfigError, "only 8 experts: give at most 8, or 'auto'"),
    "unit": ({"size": "3 bananas"}, ConfigError, "unknown unit 'bananas'"),
    "budget": ({"size": "20 KB"}, ConfigError, "holds 0 slots a layer, the model uses 2"),
    "policy": ({"policy": "crystal"}, UnknownNameError, "choose one of .*lru"),
    "algorithm": ({"experts_algorithm": "fast"}, ConfigError, "use one of auto, eager"),
    "store": ({"expert_store": "tape"}, ConfigError, "'ram' or 'file'"),
    "device": ({"device": "tpu9"}, ConfigError, "use 'cuda'"),
    "meta": ({"device": "meta"}, ConfigError, "not supported"),
    "dtype": ({"dtype": "float99"}, ConfigError, "'bfloat16'"),
    "kv": ({"kv_tokens": 0}, ConfigError, "at least 1"),
    "map": ({"device_map": "auto"}, UnsupportedOperationError, "device_map does not work"),
    "tp": ({"tp_plan": "auto"}, UnsupportedOperationError, "tp_plan does not work"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_that_cannot_take_effect_are_refused(name: str, checkpoint: Any) -> None:
    options, error, message = BAD_OPTIONS[name]
    with pytest.raises(error, match=message):
        load(checkpoint("olmoe"), **options)


def test_auto_says_what_it_chose(checkpoint: Any) -> None:
    cache = load(checkpoint("olmoe"), "auto").expert_cache
    assert cache.capacity == 8
    assert cache.reason.startswith("8 slots a layer: ")
    budget = load(checkpoint("olmoe"), "500 KB", kv_tokens=16).expert_cache
    assert budget.reason.startswith("8 slots a layer: 488 KiB - 5 % - ")


def test_too_little_host_memory_is_refused_before_loading(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "hotexperts.cache.host_memory.available_host_bytes"
    monkeypatch.setattr(module, lambda: 1000)
    with pytest.raises(HostMemoryError, match=r"keeping 16 experts in memory needs .*, 1000 B is"):
        load(checkpoint("olmoe"), 2, expert_store="ram")
    load(checkpoint("olmoe"), 2, expert_store="ram", check_host_memory=False)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    return zoo.save_checkpoint("olmoe", tmp_path)


def test_faulty_checkpoints_are_named(damaged: Path, tmp_path: Path) -> None:
    shard = sorted(damaged.glob("*.safetensors"))[3]
    content = shard.read_bytes()
    shard.write_bytes(content[:-200])
    with pytest.raises(CheckpointError, match=f"{shard.name}: truncated"):
        load(damaged)
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(damaged)


def test_a_checkpoint_that_lacks_an_expert_is_refused(damaged: Path) -> None:
    """The index forgets one shard that holds experts."""
    index_path = damaged / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    lost = next(f for k, f in index["weight_map"].items() if ".experts.5.gate" in k)
    index["weight_map"] = {k: f for k, f in index["weight_map"].items() if f != lost}
    index_path.write_text(json.dumps(index))
    with pytest.raises(HotExpertsError, match=r"experts"):
        load(damaged)


def test_a_checkpoint_that_lacks_any_weight_is_refused(tmp_path: Path) -> None:
    """Transformers would draw it at random."""
    model = zoo.build_model("olmoe", dtype=torch.bfloat16)
    weights = {k: v for k, v in model.state_dict().items() if "q_proj" not in k}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(CheckpointError, match=r"2 missing tensors, first model\.layers\.0\.self"):
        load(tmp_path)


def test_loading_information_is_given_when_asked(checkpoint: Any) -> None:
    model, info = load(checkpoint("olmoe"), output_loading_info=True)
    assert model.expert_cache.capacity == 2
    assert not info["missing_keys"]


def test_pickles_are_refused(tmp_path: Path) -> None:
    model = zoo.build_model("olmoe", dtype=torch.bfloat16)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle files, which are never read"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="safetensors files only"):
        load(tmp_path, use_safetensors=False)


def test_other_paths_and_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="neither a folder nor"):
        load("nowhere/at/all")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load(tmp_path)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="not a Mixture-of-Experts model"):
        load(tmp_path)


def test_an_unknown_experts_class_is_named() -> None:
    class StrangeExperts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = torch.nn.Parameter(torch.zeros(4, 2, 2))

    model = zoo.build_model("olmoe")
    model.model.layers[0].mlp.experts = StrangeExperts()
    with pytest.raises(UnsupportedModelError, match=r"StrangeExperts \(model.layers.0.mlp"):
        hot.attach(model, expert_cache_size=2, device="cpu")


def test_an_unknown_experts_parameter_is_named() -> None:
    model = zoo.build_model("olmoe")
    experts = model.model.layers[1].mlp.experts
    experts.zero_point = torch.nn.Parameter(torch.zeros(8, 2))
    with pytest.raises(UnsupportedModelError, match=r"\['zero_point'\] are not known"):
        hot.attach(model, expert_cache_size=2, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("store", ["file", "ram"])
@pytest.mark.parametrize("algorithm", ["eager", "grouped_mm", "batched_mm"])
def test_on_the_gpu_cached_equals_resident(store: str, algorithm: str, checkpoint: Any) -> None:
    path = checkpoint("olmoe")
    full = resident(path, algorithm).to("cuda")
    prompt = zoo.sample_ids().to("cuda")
    with torch.no_grad():
        expected = full(prompt).logits
    options = {"do_sample": False, "max_new_tokens": 12, "disable_compile": True}
    full.set_experts_implementation(algorithm)
    expected_tokens = full.generate(prompt, **options)
    for size in (1, 3, 8):
        cached = load(path, size, expert_store=store, experts_algorithm=algorithm, device="cuda")
        with torch.no_grad():
            found = cached(prompt).logits
        bound = 0 if algorithm == "eager" else 0.05
        assert (found - expected).abs().max() <= bound, size
        if algorithm == "eager":
            assert torch.equal(cached.generate(prompt, **options), expected_tokens)
        providers = cached.expert_cache.providers
        assert all(isinstance(p.store, CPUBackingStore) == (store == "ram") for p in providers)
