"""What a cached model must not do, checkpoints that do not fit, options that mean nothing."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import hotexperts.transformers as hot
from hotexperts.cache import CPUBackingStore
from hotexperts.errors import (
    CheckpointError,
    ConfigError,
    HostMemoryError,
    HotExpertsError,
    UnknownNameError,
    UnsupportedOperationError,
)
from hotexperts.integrations.transformers.build import _kv_nbytes
from hotexperts.integrations.transformers.modules import top_k_of
from integrations import zoo

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"))


def load(path: Path, size: int | str = 3, **options: Any) -> Any:
    return hot.load(path, expert_cache_size=size, **{"device": "cpu", **options})


def resident(path: Path, **options: Any) -> Any:
    options = {"dtype": "auto", "experts_implementation": "eager", **options}
    return AutoModelForCausalLM.from_pretrained(path, **options)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(zoo.sample_ids()).logits


REFUSED: dict[str, tuple[Callable[[Any, Path], object], str]] = {
    "implementation": (lambda m, p: m.set_experts_implementation("eager"), "experts_algorithm"),
    "of_each_part": (lambda m, p: m.set_experts_implementation({"": "grouped_mm"}), "'grouped_mm'"),
    "of_the_inner": (lambda m, p: m.model.set_experts_implementation("eager"), "'eager'"),
    "deepcopy": (lambda m, p: copy.deepcopy(m), r"deepcopy\(\)"),
    "copy": (lambda m, p: copy.copy(m), r"pickle\(\)"),
    "pickle": (lambda m, p: pickle.dumps(m), r"pickle\(\)"),
    "torch.save": (lambda m, p: torch.save(m, io.BytesIO()), r"pickle\(\)"),
    "state": (lambda m, p: m.load_state_dict({}, strict=False), "would leave its experts"),
    "inner_half": (lambda m, p: m.model.half(), "slots stay where they are"),
    "layers_half": (lambda m, p: m.model.layers.half(), "slots stay where they are"),
    "layer_double": (lambda m, p: m.model.layers[0].double(), "slots stay where they are"),
    "inner_save": (lambda m, p: m.model.save_pretrained(p / "x"), "without its experts"),
    "inner_train": (lambda m, p: m.model.train(), "not parameters"),
    "layer_train": (lambda m, p: m.model.layers[1].train(), "not parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_break_a_part_is_refused(name: str, olmoe: Path, tmp_path: Path) -> None:
    cached = load(olmoe)
    expected, dtypes = logits(cached), [p.dtype for p in cached.parameters()]
    do, message = REFUSED[name]
    with pytest.raises(UnsupportedOperationError, match=message):
        do(cached, tmp_path)
    assert not list(tmp_path.iterdir())
    assert [p.dtype for p in cached.parameters()] == dtypes
    assert not any(module.training for module in cached.modules())
    assert torch.equal(logits(cached), expected)


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "batched_mm"])
def test_no_implementation_computes_without_the_experts(name: str, olmoe: Path) -> None:
    """Set behind the model's back: it must not return what lies in some memory."""
    cached = load(olmoe)
    expected = logits(cached)
    cached.config._experts_implementation = name
    with pytest.raises(UnsupportedOperationError, match="not in the model"):
        logits(cached)
    cached.set_experts_implementation("hotexperts")
    assert torch.equal(logits(cached), expected)


def test_parts_without_experts_stay_free(olmoe: Path) -> None:
    cached = load(olmoe)
    assert cached.set_experts_implementation("hotexperts") is None
    assert cached.model.to(torch.bfloat16).eval() is cached.model
    cached.lm_head.double()
    assert cached.lm_head.weight.dtype == torch.float64


def test_the_class_looks_like_the_models_own(olmoe: Path) -> None:
    cached, plain = load(olmoe), resident(olmoe)
    for a, b in ((cached, plain), (cached.model, plain.model)):
        assert isinstance(a, type(b))
        assert str(type(a)) == str(type(b))
        assert type(a)._can_set_experts_implementation()
        assert type(a).config_class is type(b).config_class


def cached_olmoe(folder: Path) -> Any:
    return load(zoo.save_checkpoint("olmoe", folder), expert_store="ram")


def cached_gpt_oss(folder: Path) -> Any:
    return load(zoo.build_mxfp4_checkpoint(folder), expert_store="file")


def cached_llama4(folder: Path) -> Any:
    return hot.attach(zoo.build_llama4(), expert_cache_size=3, device="cpu")


@pytest.mark.parametrize("make", [cached_olmoe, cached_gpt_oss, cached_llama4])
def test_a_deleted_model_is_freed_at_once(make: Callable[[Path], Any], tmp_path: Path) -> None:
    cached = make(tmp_path)
    logits(cached)
    reference = weakref.ref(cached)
    gc.collect()  # of what loading left behind
    gc.disable()
    try:
        del cached
        assert reference() is None
    finally:
        gc.enable()


def rewrite(folder: Path, change: Callable[[dict[str, dict[str, torch.Tensor]]], None]) -> Path:
    """Change a sharded checkpoint, given as file to name to tensor."""
    files = {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}
    change(files)
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {key: file for file, tensors in files.items() for key in tensors}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return folder


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    return zoo.save_checkpoint("qwen3_moe", tmp_path)


def test_a_lost_expert_is_missed_though_another_is_there_twice(damaged: Path) -> None:
    """The number of tensors is right; taken in order, expert 3 would be expert 4."""

    def lose_3_repeat_5(files: dict[str, dict[str, torch.Tensor]]) -> None:
        for tensors in files.values():
            for key in [k for k in tensors if ".0.mlp.experts.3." in k]:
                del tensors[key]
        for file, other in zip(list(files), [*list(files)[1:], *files], strict=False):
            found = {k: v.clone() for k, v in files[file].items() if ".0.mlp.experts.5." in k}
            files[other].update(found)

    rewrite(damaged, lose_3_repeat_5)
    with pytest.raises(CheckpointError, match=r"no tensor of expert 3, and lacks 1 of 8"):
        load(damaged, expert_store="file")


def test_an_expert_too_many_is_named(damaged: Path) -> None:
    def add_8(files: dict[str, dict[str, torch.Tensor]]) -> None:
        for tensors in files.values():
            found = {k: v for k, v in tensors.items() if ".0.mlp.experts.7." in k}
            tensors.update({k.replace(".7.", ".8."): v.clone() for k, v in found.items()})

    rewrite(damaged, add_8)
    with pytest.raises(CheckpointError, match="has expert 8, the model has 8 experts"):
        load(damaged, expert_store="file")


def test_an_expert_of_another_shape_is_named_before_it_is_missed(damaged: Path) -> None:
    def cut_6(files: dict[str, dict[str, torch.Tensor]]) -> None:
        for tensors in files.values():
            for key in [k for k in tensors if ".experts.6.down" in k]:
                tensors[key] = tensors[key][:-1].clone()

    rewrite(damaged, cut_6)
    with pytest.raises(CheckpointError, match=r"expert 0 has shape \[64, \d+\], expert 6 \[63, "):
        load(damaged, expert_store="file")


def test_of_a_key_in_two_files_the_later_counts(damaged: Path) -> None:
    def repeat(files: dict[str, dict[str, torch.Tensor]]) -> None:
        first, last = next(iter(files)), list(files)[-1]
        for tensors in list(files.values()):
            found = {k: v for k, v in tensors.items() if ".experts.5.down" in k}
            files[first].update({k: torch.zeros_like(v) for k, v in found.items()})
            files[last].update({k: v * 2 for k, v in found.items() if v.any()})

    rewrite(damaged, repeat)
    cached = load(damaged, expert_store="file", experts_algorithm="eager")
    assert torch.equal(logits(cached), logits(resident(damaged)))


def test_a_file_that_is_cut_while_its_model_runs_is_named(damaged: Path) -> None:
    """And what is there again is read again."""
    cached = load(damaged, 2, expert_store="file")
    before = logits(cached)
    whole = {file: file.read_bytes() for file in damaged.glob("*.safetensors")}
    for file, content in whole.items():
        os.truncate(file, len(content) - 1)  # Transformers, too, has them mapped for a CPU
    with pytest.raises(
        CheckpointError, match=r"safetensors: had \d+ bytes when it was opened, and"
    ):
        logits(cached)
    for file, content in whole.items():
        with file.open("r+b") as opened:
            opened.write(content)
    assert torch.equal(logits(cached), before)


def test_tensors_of_a_dtype_that_no_expert_has_do_no_harm(damaged: Path) -> None:
    def add(files: dict[str, dict[str, torch.Tensor]]) -> None:
        next(iter(files.values()))["counts"] = torch.zeros(3, dtype=torch.uint16)

    rewrite(damaged, add)
    load(damaged, expert_store="file")


ONE_EXPERT = {
    "mixtral": {"num_local_experts": 1},
    "qwen3_moe": {"num_experts": 1},
    "gpt_oss": {"num_local_experts": 1},
    "granitemoe": {"num_local_experts": 1},
}


@pytest.mark.parametrize("store", ["file", "ram"])
@pytest.mark.parametrize("family", ONE_EXPERT)
def test_a_single_expert_is_a_mixture_too(family: str, store: str, tmp_path: Path) -> None:
    fields = {**zoo._FAMILY_CONFIGS[family], **ONE_EXPERT[family], "num_experts_per_tok": 1}
    zoo._build(family, fields, 0, torch.bfloat16).save_pretrained(tmp_path)
    cached = load(tmp_path, 1, expert_store=store, experts_algorithm="eager")
    assert torch.equal(logits(cached), logits(resident(tmp_path)))


@pytest.mark.parametrize("store", ["file", "ram"])
def test_a_converter_that_asks_the_model_for_shapes(store: str, tmp_path: Path) -> None:
    """Qwen3-VL-MoE's experts are transposed where their shape is not the parameter's."""
    text = {
        **zoo._COMMON,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [4, 2, 2],
            "rope_theta": 1e4,
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    zoo._randomize(model, torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path)
    full = AutoModelForImageTextToText.from_pretrained(
        tmp_path, dtype="auto", experts_implementation="eager"
    )
    cached = load(
        tmp_path,
        expert_store=store,
        experts_algorithm="eager",
        auto_class=AutoModelForImageTextToText,
    )
    assert torch.equal(logits(cached), logits(full))


def test_options_of_from_pretrained_reach_the_configuration(olmoe: Path) -> None:
    cached = load(olmoe, num_hidden_layers=1, norm_topk_prob=True)
    assert (len(cached.expert_cache.names), cached.config.norm_topk_prob) == (1, True)
    plain = resident(olmoe, num_hidden_layers=1, norm_topk_prob=True)
    assert (logits(cached) - logits(plain)).abs().max() < 0.05
    below = load(olmoe.parent, subfolder=olmoe.name, force_download=False, proxies=None)
    assert below.config.num_hidden_layers == 2
    assert load(olmoe, torch_dtype=torch.float16).dtype == torch.float16
    assert load(olmoe, dtype="float32").dtype == torch.float32


BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[HotExpertsError], str]] = {
    "config": ({"config": object()}, UnsupportedOperationError, "config does not work"),
    "gguf": (
        {"gguf_file": "x.gguf"},
        UnsupportedOperationError,
        "give the path of the file itself",
    ),
    "experts": ({"experts_implementation": "eager"}, UnsupportedOperationError, "_algorithm"),
    "quantise": (
        {"quantization_config": {"a": 1}},
        UnsupportedOperationError,
        "give expert_dtype to quantise",
    ),
    "dtype_none": ({"dtype": None}, ConfigError, "dtype None does not work: use 'auto'"),
    "dtype_dict": ({"dtype": {"": "float16"}}, ConfigError, "does not work: use 'auto'"),
    "dtype_int8": ({"dtype": "int8"}, ConfigError, "dtype 'int8' does not work"),
    "dtype_int64": ({"dtype": torch.int64}, ConfigError, "dtype torch.int64 does not work"),
    "dtype_fp8": ({"dtype": torch.float8_e4m3fn}, ConfigError, "float8_e4m3fn does not work"),
    "dtype_twice": (
        {"dtype": "float16", "torch_dtype": torch.float32},
        ConfigError,
        "not both",
    ),
    "abstract": (
        {"policy": "hotexperts.policy.base:Policy"},
        ConfigError,
        "is abstract: it must define .*record",
    ),
    "policy_none": ({"policy": None}, ConfigError, "policy is None: give a name"),
    "kv_text": ({"kv_tokens": "12"}, ConfigError, "kv_tokens is '12': give a whole number"),
    "kv_half": ({"kv_tokens": 1.5}, ConfigError, "kv_tokens is 1.5: give a whole number"),
    "progress": ({"progress": None}, ConfigError, "progress is None: give a function"),
    "device": ({"device": [1]}, ConfigError, r"device \[1\] is not one"),
    "size": ({"size": "9" * 400 + "GiB"}, ConfigError, "has 403 characters"),
    "path_number": ({"path": 5}, CheckpointError, "5 is no model"),
    "path_none": ({"path": None}, CheckpointError, "None is no model"),
    "path_empty": ({"path": ""}, CheckpointError, "'' is no model"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_that_mean_nothing_are_one_line(name: str, olmoe: Path) -> None:
    options, error, message = BAD_OPTIONS[name]
    with pytest.raises(error, match=message) as caught:
        load(**{"path": olmoe, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("code", ["def (", "raise RuntimeError('no')", "1 / 0"])
def test_a_policy_module_that_fails_is_named(
    code: str, olmoe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_policy.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownNameError, match=r"cannot load policy 'failing_policy:Best' .*lru"):
        load(olmoe, policy="failing_policy:Best")


@pytest.mark.parametrize("where", ["disk", "meta"])
def test_installed_models_need_a_device(where: str, olmoe: Path) -> None:
    hot.install(expert_cache_size=2)
    with pytest.raises(UnsupportedOperationError, match=f"{where} is not supported"):
        resident(olmoe, experts_implementation="hotexperts", device_map={"": where})


def test_a_model_whose_experts_were_taken_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a cache of a part of it, or by an attach that broke off after its first layer."""
    options: dict[str, Any] = {"expert_cache_size": 3, "device": "cpu"}
    model = zoo.build_model("olmoe")
    hot.attach(model.model, **options)
    message = r"layers\.0\.mlp\.experts has given its experts to a cache already, .*: load the mod"
    with pytest.raises(UnsupportedOperationError, match=message):
        hot.attach(model, **options)
    make, model = CPUBackingStore.from_tensors, zoo.build_model("olmoe")
    made: list[Any] = []

    def refuse_the_second(*args: Any, **kwargs: Any) -> Any:
        if made:
            raise HostMemoryError("no more memory")
        made.append(make(*args, **kwargs))
        return made[0]

    monkeypatch.setattr(CPUBackingStore, "from_tensors", refuse_the_second)
    with pytest.raises(HostMemoryError, match="no more memory"):
        hot.attach(model, **options)
    with pytest.raises(UnsupportedOperationError, match=message):
        hot.attach(model, **options)


def test_a_model_without_weights_cannot_be_attached() -> None:
    model = zoo.build_model("olmoe").to("meta")
    with pytest.raises(UnsupportedOperationError, match="holds no weights"):
        hot.attach(model, expert_cache_size=3, device="cpu")
    assert list(model.model.layers[0].mlp.experts.parameters())


def test_an_error_of_the_users_own_stays_what_it_is(olmoe: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise BrokenPipeError("their pipe")

    with pytest.raises(BrokenPipeError, match="their pipe"):
        load(olmoe, progress=fail)


def test_only_weights_in_pickles_are_called_pickles(tmp_path: Path) -> None:
    zoo.build_model("olmoe").config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "training_args.bin")
    with pytest.raises(CheckpointError, match=r"holds no weights: .*\*\.safetensors"):
        load(tmp_path)
    torch.save({}, tmp_path / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(CheckpointError, match="pickle files, which are never read"):
        load(tmp_path)


class Config:
    """A configuration with the given values only."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def get_text_config(self) -> Config:
        return self


@pytest.mark.parametrize(
    ("values", "num_bytes"),
    [
        ({"num_hidden_layers": 2}, 0),
        ({"num_attention_heads": None, "hidden_size": 8, "num_hidden_layers": 2}, 0),
        ({"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 2}, 2 * 2 * 32 * 2),
        ({"num_attention_heads": [2, 4], "head_dim": 8, "num_hidden_layers": 1}, 2 * 32 * 2),
        ({"num_attention_heads": 4}, 0),
    ],
)
def test_keys_and_values_of_any_configuration(values: dict[str, Any], num_bytes: int) -> None:
    assert _kv_nbytes(Config(**values), 1) == num_bytes


def test_experts_a_token_by_every_name() -> None:
    assert top_k_of(Config(moe_topk=[2, 6]), 16) == 6
    assert top_k_of(Config(moe_topk=[2, 6]), 4) == 4
    assert top_k_of(Config(), 16) == 1
