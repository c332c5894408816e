"""Cached equals resident, on every family; and what a cached model refuses to do."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    modeling_utils,
)

import hotexperts.transformers as hot
from hotexperts.cache import CPUBackingStore, FileStore
from hotexperts.cache.packed_store import PackedBackingStore
from hotexperts.cache.safetensors_file import SafetensorsFile
from hotexperts.errors import (
    CheckpointError,
    ConcurrentUseError,
    ConfigError,
    HostMemoryError,
    UnknownNameError,
    UnsupportedModelError,
    UnsupportedOperationError,
)
from integrations import zoo

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]


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
            assert torch.equal(logits(cached), expected), (algorithm, size)
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
    # The model runs every expert on every token and adds up zeros too, in another order: float32
    # may differ by a few units in the last place of logits near 5; bfloat16 rounds that away.
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
    # Sound bytes give 0; this is far above what rounding could do, and far below what is found.
    assert (logits(cached) - expected).abs().max() > 0.01


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "gpt_oss", "granitemoe", "minimax"])
def test_views_equal_the_general_converter(
    family: str, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast path (views of the file) against its twin, Transformers' converter."""
    path = checkpoint(family)
    fast = load(path, 8, expert_store="ram")
    module = "hotexperts.integrations.transformers.compat"
    monkeypatch.setattr(f"{module}.only_stacks", lambda operations: False)
    slow = load(path, 8, expert_store="ram")
    for a, b in zip(fast.expert_cache.providers, slow.expert_cache.providers, strict=True):
        assert torch.equal(a.store.rows, b.store.rows)


class _Spied:
    """A safetensors object whose `get_slice` results note their name when they are read."""

    def __init__(self, spied: Any, name: str, read: list[str]) -> None:
        self._spied, self._name, self._read = spied, name, read

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._spied, attribute)

    def get_slice(self, name: str) -> _Spied:
        return _Spied(self._spied.get_slice(name), name, self._read)

    def __getitem__(self, index: Any) -> torch.Tensor:
        self._read.append(self._name)
        return self._spied[index]


@pytest.fixture
def read_by_transformers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checkpoint tensors that Transformers' loader reads."""
    read: list[str] = []
    original = modeling_utils.safe_open

    def open_spied(*args: Any, **kwargs: Any) -> _Spied:
        return _Spied(original(*args, **kwargs), "", read)

    monkeypatch.setattr(modeling_utils, "safe_open", open_spied)
    return read


def test_experts_are_not_read_by_transformers(
    checkpoint: Any, read_by_transformers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of an expert exists before a token asks for it, and none is a parameter."""
    copied: list[int] = []
    viewed: list[str] = []
    copy_into, tensor = FileStore.copy_into, SafetensorsFile.tensor
    monkeypatch.setattr(
        FileStore, "copy_into", lambda self, e, t: (copied.append(e), copy_into(self, e, t))
    )
    monkeypatch.setattr(
        SafetensorsFile, "tensor", lambda self, name: (viewed.append(name), tensor(self, name))[1]
    )
    path = checkpoint("olmoe")
    cached = load(path, 2)
    in_the_file = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(read_by_transformers) == sorted(k for k in in_the_file if ".experts." not in k)
    assert copied == []
    assert {name.split(".")[5] for name in viewed} == {"0"}  # shapes of one expert a layer
    assert not [n for n, _ in cached.named_parameters() if "experts." in n]
    assert cached.expert_cache.host_nbytes == 0
    logits(cached)
    assert len(copied) == cached.expert_cache.stats.misses > 0


def test_the_spy_sees_experts_that_transformers_reads(
    checkpoint: Any, read_by_transformers: list[str]
) -> None:
    resident(checkpoint("olmoe"), "eager")
    assert [name for name in read_by_transformers if ".experts." in name]


def test_ram_store_holds_every_row_once(checkpoint: Any) -> None:
    cache = load(checkpoint("olmoe"), 2, expert_store="ram").expert_cache
    rows = sum(p.store.num_experts * p.store.layout.row_nbytes for p in cache.providers)
    assert cache.host_nbytes == rows


def test_progress_counts_the_bytes_of_every_expert(checkpoint: Any) -> None:
    seen: list[tuple[int, int]] = []
    tell = lambda *step: seen.append(step)  # noqa: E731
    cache = load(checkpoint("olmoe"), 2, expert_store="ram", progress=tell).expert_cache
    assert seen[-1] == (cache.expert_nbytes, cache.expert_nbytes)
    done = [step[0] for step in seen]
    assert done == sorted(set(done))
    assert done[0] > 0


def test_attach_to_a_loaded_model(checkpoint: Any) -> None:
    full = resident(checkpoint("olmoe"), "grouped_mm")
    expected = logits(full)
    cached = hot.attach(full, expert_cache_size=3, device="cpu")
    assert cached is full
    assert torch.equal(logits(cached), expected)
    with pytest.raises(UnsupportedOperationError, match="has an expert cache already"):
        hot.attach(cached, expert_cache_size=3, device="cpu")


def test_attach_takes_all_where_all_fits(checkpoint: Any) -> None:
    cached = hot.attach(resident(checkpoint("olmoe"), "eager"), device="cpu")
    assert cached.expert_cache.capacity == 8


def test_the_cache_says_what_it_is_in_one_line(checkpoint: Any) -> None:
    cached = load(checkpoint("olmoe"), 3, policy="lfu")
    shown = "<ExpertCache: 3 of 8 experts in each of 2 layers, lfu run by the host, experts in file"
    assert repr(cached.expert_cache) == f"{shown}, not used yet>"
    logits(cached)
    rate = 100 * cached.expert_cache.stats.hit_rate
    assert repr(cached.expert_cache) == f"{shown}, {rate:.1f} % hits>"


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
        assert leave.wait(10)
        copy_into(expert, tensors)

    provider.store.copy_into = slow
    thread = threading.Thread(target=lambda: logits(cached))
    thread.start()
    assert inside.wait(10)
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


def test_a_budget_leaves_room_for_no_more_tokens_than_the_model_has_positions(
    checkpoint: Any,
) -> None:
    path = checkpoint("olmoe")
    reason = load(path, "500 KB", kv_tokens=128).expert_cache.reason
    assert load(path, "500 KB").expert_cache.reason == reason
    assert load(path, "500 KB", max_position_embeddings=64).expert_cache.reason != reason
    full = resident(path, "eager")
    attached = hot.attach(full, expert_cache_size="500 KB", device="cpu").expert_cache
    assert attached.reason == reason
    with pytest.raises(ConfigError, match="a GPU budget of 488 KiB holds 0"):
        load(path, "500 KB", kv_tokens=4096)  # a wish is a wish: batches add up


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
    """The index forgets the shard with the gates of layer 0."""
    index_path = damaged / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    lost = next(f for k, f in index["weight_map"].items() if ".experts.5.gate" in k)
    index["weight_map"] = {k: f for k, f in index["weight_map"].items() if f != lost}
    index_path.write_text(json.dumps(index))
    message = (
        r"incomplete: model\.layers\.0\.mlp\.experts\.gate_up_proj needs tensors named "
        r"mlp\.experts\.\*\.gate_proj\.weight"
    )
    with pytest.raises(CheckpointError, match=message):
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


_TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_TINY_STEP3 = {
    **_TINY,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "share_expert_dim": 32,
    "mlp_layer_types": ["sparse"],
    "layer_types": ["full_attention"],
    "pad_token_id": 0,
}
UNKNOWN_EXPERTS = {
    # Model type to its configuration and what must be named. DBRX keeps its weights one module
    # deeper than its experts class.
    "dbrx": (
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 1,
            "max_seq_len": 64,
            "vocab_size": 96,
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
        },
        r"DbrxExperts \(transformer\.blocks\.0\.ffn\.experts\)",
    ),
    "jetmoe": (
        {
            **_TINY,
            "num_key_value_heads": 2,
            "kv_channels": 16,
            "intermediate_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "JetMoeParallelExperts",
    ),
    "longcat_flash": (
        {
            **_TINY,
            "num_layers": 1,
            "num_hidden_layers": 2,
            "ffn_hidden_size": 48,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "head_dim": 16,
            "v_head_dim": 16,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 48,
        },
        "LongcatFlashExperts",
    ),
    "step3p7": (
        {
            "text_config": _TINY_STEP3,
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
            },
        },
        "Step3p7Experts",
    ),
}


@pytest.mark.parametrize("model_type", UNKNOWN_EXPERTS)
def test_real_models_with_experts_of_unknown_form_are_named(model_type: str) -> None:
    settings, named = UNKNOWN_EXPERTS[model_type]
    config = AutoConfig.for_model(model_type, **settings)
    auto = AutoModelForCausalLM if model_type != "step3p7" else AutoModelForImageTextToText
    model = auto.from_config(config)
    with pytest.raises(UnsupportedModelError, match=named):
        hot.attach(model, expert_cache_size=2, device="cpu")


def linear_experts(model: Any) -> torch.nn.Module:
    class SharedExperts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4, bias=False)

    return SharedExperts()


def listed_experts(model: Any) -> torch.nn.Module:
    class ListedExperts(torch.nn.ModuleList):
        pass

    return ListedExperts(linear_experts(model) for _ in range(2))


def wrapped_experts(model: Any) -> torch.nn.Module:
    class WrappedExperts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(model.model.layers[0].mlp.experts)

    return WrappedExperts()


@pytest.mark.parametrize("make", [linear_experts, listed_experts, wrapped_experts])
def test_experts_by_name_alone_are_not_refused(make: Any) -> None:
    model = zoo.build_model("olmoe")
    expected = logits(model)
    model.model.layers[0].mlp.more = make(model)
    cached = hot.attach(model, expert_cache_size=2, device="cpu", experts_algorithm="eager")
    assert torch.equal(logits(cached), expected)


SPARSE = {"num_layers": 2, "num_experts": 8, "vocab_size": 96, "d_model": 32, "d_ff": 48}
UNSTACKED_EXPERTS: dict[str, tuple[dict[str, Any], str]] = {
    "switch_transformers": (
        {**SPARSE, "num_sparse_encoder_layers": 1, "num_heads": 2, "d_kv": 16},
        r"SwitchTransformersExperts \(encoder\.block\.1\..*experts\) holds 8 experts as modules",
    ),
    "nllb-moe": (
        {
            **SPARSE,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_sparse_step": 1,
        },
        r"NllbMoeExperts \(model\.encoder\.layers\.0\.ffn\.experts\) holds \d experts as modules",
    ),
}


@pytest.mark.parametrize("model_type", UNSTACKED_EXPERTS)
def test_experts_that_nobody_stacked_are_named(model_type: str) -> None:
    settings, named = UNSTACKED_EXPERTS[model_type]
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(model_type, **settings))
    with pytest.raises(UnsupportedModelError, match=named):
        hot.attach(model, expert_cache_size=2, device="cpu")


@pytest.mark.parametrize("algorithm", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", zoo.OTHERS)
def test_attached_equals_resident_whatever_dtype_it_adds_up_in(family: str, algorithm: str) -> None:
    """Not in every Transformers, or no causal language models: attached, in bf16."""
    if family not in CONFIG_MAPPING:
        pytest.skip("not in this Transformers")

    def build() -> Any:
        return zoo.build_other(family, experts_implementation=algorithm)

    expected = logits(build())
    for size in (1, 3, 8):
        options = {"device": "cpu", "experts_algorithm": algorithm}
        cached = hot.attach(build(), expert_cache_size=size, **options)
        assert torch.equal(logits(cached), expected), size


def test_shared_experts_stay_with_the_other_weights(checkpoint: Any) -> None:
    """Inkling stacks them like routed ones, but every token uses each."""
    cached = load(checkpoint("inkling"))
    kept = [name for name, _ in cached.named_parameters() if ".experts." in name]
    shared = [p for name, p in cached.named_parameters() if ".shared_experts." in name]
    assert (kept, len(shared), {p.dim() for p in shared}) == ([], 6, {3})
    assert cached.expert_cache.names == tuple(f"model.layers.{i}.mlp.experts" for i in range(2))


def test_an_unknown_experts_parameter_is_named() -> None:
    model = zoo.build_model("olmoe")
    experts = model.model.layers[1].mlp.experts
    experts.zero_point = torch.nn.Parameter(torch.zeros(8, 2))
    with pytest.raises(UnsupportedModelError, match=r"\['zero_point'\] are not known"):
        hot.attach(model, expert_cache_size=2, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("store", "mode"), [("file", "host"), ("ram", "host"), ("ram", "device")])
@pytest.mark.parametrize("algorithm", ["eager", "grouped_mm", "batched_mm"])
def test_on_the_gpu_cached_equals_resident(
    store: str, mode: str, algorithm: str, checkpoint: Any
) -> None:
    path = checkpoint("olmoe")
    full = resident(path, algorithm).to("cuda")
    prompt = zoo.sample_ids().to("cuda")
    with torch.no_grad():
        expected = full(prompt).logits
    options = {"do_sample": False, "max_new_tokens": 12, "disable_compile": True}
    full.set_experts_implementation(algorithm)
    expected_tokens = full.generate(prompt, **options)
    for size in (1, 3, 8):
        kept = {"expert_store": store, "cache_mode": mode, "experts_algorithm": algorithm}
        cached = load(path, size, device="cuda", **kept)
        with torch.no_grad():
            found = cached(prompt).logits
        # CUDA's matrix products may choose another kernel for another number of rows: a few
        # units in the last place of bfloat16 logits near 4.
        bound = 0 if algorithm == "eager" else 0.05
        assert (found - expected).abs().max() <= bound, size
        if algorithm == "eager":
            assert torch.equal(cached.generate(prompt, **options), expected_tokens)
        providers = cached.expert_cache.providers
        in_memory = CPUBackingStore, PackedBackingStore
        assert all(isinstance(p.store, in_memory) == (store == "ram") for p in providers)
