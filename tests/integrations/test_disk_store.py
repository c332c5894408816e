"""Models whose experts are on disk: the same tokens, the right store, and refusals in time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hotexperts.transformers as hot
from cache.packs import flip
from hotexperts.cache import CPUBackingStore, DiskBackingStore, FileStore
from hotexperts.cache.pack_format import PackHeader
from hotexperts.errors import CheckpointError, ConfigError, HostMemoryError, UnsupportedModelError
from hotexperts.integrations.transformers import tiers
from integrations import zoo

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]

GIB = 2**30


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packs go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hotexperts"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return zoo.save_checkpoint("olmoe", tmp_path / "model")


def load(path: Path, **options: Any) -> Any:
    return hot.load(path, **{"expert_cache_size": 3, "device": "cpu", **options})


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(zoo.sample_ids()).logits


def stride_of(path: Path) -> int:
    """Bytes of one row of each layer, as they lie on disk."""
    return sum(layer.row_stride for layer in PackHeader.read(path).layers)


@pytest.mark.parametrize(
    "build",
    [
        lambda folder: zoo.save_checkpoint("olmoe", folder),
        lambda folder: zoo.save_checkpoint("gpt_oss", folder),
        zoo.build_fp8_checkpoint,
    ],
    ids=["olmoe", "gpt_oss", "fp8"],
)
def test_a_third_of_the_experts_in_memory_gives_the_same_bits(
    build: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = build(tmp_path / "model")
    packed = hot.pack(path)
    assert packed.num_written == packed.num_rows
    budget = 2 * stride_of(packed.path)  # two experts of eight
    model = load(path, expert_store="disk", expert_ram_gib=budget / GIB)
    expected = load(path, expert_store="ram")
    assert torch.equal(logits(model), logits(expected))
    prompt = zoo.sample_ids(batch=2, length=6)
    tokens = [m.generate(prompt, max_new_tokens=8, do_sample=False) for m in (model, expected)]
    assert torch.equal(*tokens)
    cache, stats = model.expert_cache, model.expert_cache.stats
    assert cache.host_nbytes == budget
    assert cache.store_reason.startswith("disk: as asked; 2 of 8 experts a layer in ")
    assert (cache.store, cache.mode) == ("disk", "host")
    assert cache.mode_reason == "host: experts stay on disk"
    assert stats.disk_reads > 0
    assert stats.ram_hits + stats.disk_reads == stats.misses
    assert {"ram_hits", "disk_reads", "disk_bytes"} <= next(iter(cache.counters().values())).keys()
    cache.reset_stats()
    assert (cache.stats.disk_reads, cache.stats.ram_hits) == (0, 0)


def test_a_pack_is_made_once_and_again_when_the_checkpoint_changed(
    checkpoint: Path, cache_folder: Path
) -> None:
    first = hot.pack(checkpoint)
    assert first.path.parent == cache_folder
    again = hot.pack(checkpoint)
    assert (again.path, again.num_written) == (first.path, 0)
    file = sorted(checkpoint.glob("*.safetensors"))[0]
    os.utime(file, ns=(1, 1))
    message = rf"{first.path.name}: the checkpoint changed since it was packed: {file.name} was"
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint, expert_store="disk")
    assert hot.pack(checkpoint).num_written == first.num_rows
    assert load(checkpoint, expert_store="disk").expert_cache.store == "disk"


def test_progress_goes_to_the_end(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    hot.pack(checkpoint, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 16) for done in range(17)]


def test_a_pack_is_where_it_is_asked_to_be(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "elsewhere" / "my.pack"
    assert hot.pack(checkpoint, expert_pack=file).path == file
    assert load(checkpoint, expert_store="disk", expert_pack=file).expert_cache.store == "disk"
    with pytest.raises(
        CheckpointError, match="make it once with `hotexperts pack` and the --dtype of"
    ):
        load(checkpoint, expert_store="disk")
    file.write_text("my diary")
    with pytest.raises(ConfigError, match="is there and is no pack: name another file"):
        hot.pack(checkpoint, expert_pack=file)
    assert file.read_text() == "my diary"


def test_a_pack_of_another_model_or_dtype_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = hot.pack(checkpoint).path
    with pytest.raises(CheckpointError, match=r"holds 8 experts .*bfloat16.*wants .*float32"):
        load(checkpoint, expert_store="disk", dtype="float32", expert_pack=file)
    hot.pack(checkpoint, dtype="float32")
    float32 = load(checkpoint, expert_store="disk", dtype="float32")
    expected = load(checkpoint, expert_store="ram", dtype="float32")
    assert torch.equal(logits(float32), logits(expected))
    other = zoo.save_checkpoint("gpt_oss", tmp_path / "other")
    with pytest.raises(CheckpointError, match="changed since it was packed"):
        load(other, expert_store="disk", expert_pack=file)


def test_a_damaged_row_stops_generation_and_names_itself(checkpoint: Path) -> None:
    file = hot.pack(checkpoint).path
    header = PackHeader.read(file)
    for expert in range(8):
        flip(file, header.place(1, expert).offset + 5)
    model = load(checkpoint, expert_store="disk")
    name = header.layers[1].name
    with pytest.raises(CheckpointError, match=rf"the row of expert \d of {name} is damaged"):
        logits(model)


def test_packing_again_mends_a_damaged_row(checkpoint: Path) -> None:
    """As the message of a damaged row says."""
    first = hot.pack(checkpoint)
    whole = first.path.read_bytes()
    for offset in (PackHeader.read(first.path).place(1, 3).offset + 5, 4096):  # a row; the table
        flip(first.path, offset)
        assert hot.pack(checkpoint).num_written == first.num_rows
        assert first.path.read_bytes() == whole
        assert hot.pack(checkpoint).num_written == 0


def test_a_user_without_a_home_folder_names_the_pack(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user has a number alone."""

    def refuse(name: Any) -> None:
        raise KeyError(name)

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", refuse)
    with pytest.raises(ConfigError, match=r"no home folder: name it \(expert_pack, --expert-pack"):
        hot.pack(checkpoint)
    file = tmp_path / "my.pack"
    assert hot.pack(checkpoint, expert_pack=file).path == file
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hot.pack(checkpoint).path.parent == tmp_path / "hotexperts"


def test_a_folder_or_a_pipe_is_no_pack(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is there and is no pack: name another file"):
        hot.pack(checkpoint, expert_pack=tmp_path)
    os.mkfifo(tmp_path / "pipe")  # which nobody else opens: not to be waited for
    with pytest.raises(ConfigError, match="is there and is no pack: name another file"):
        hot.pack(checkpoint, expert_pack=tmp_path / "pipe")
    for path, kind in ((tmp_path, "a folder"), (tmp_path / "pipe", "a pipe")):
        with pytest.raises(CheckpointError, match=f"{kind} is there, and no pack: name a file"):
            load(checkpoint, expert_store="disk", expert_pack=path)


def test_auto_goes_by_the_free_memory_and_says_so(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(p.store.host_nbytes for p in load(checkpoint).expert_cache.providers)
    free = [0]
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: free[0])
    options = {"expert_store": "auto"}

    free[0] = needed * 2
    cache = load(checkpoint, **options).expert_cache
    assert cache.store == "ram"
    assert isinstance(cache.providers[0].store, CPUBackingStore)
    sizes = r"\d+ KiB of experts, \d+ KiB of memory for them"
    assert _matches(rf"ram: {sizes}", cache.store_reason)

    free[0] = needed  # of which only 0.8 are taken
    cache = load(checkpoint, **options).expert_cache
    assert cache.store == "file"
    assert isinstance(cache.providers[0].store, FileStore)
    assert _matches(rf"file: {sizes}, and no pack \(.*", cache.store_reason)

    hot.pack(checkpoint)
    cache = load(checkpoint, **options).expert_cache
    assert cache.store == "disk"
    assert isinstance(cache.providers[0].store, DiskBackingStore)
    assert _matches(rf"disk: {sizes}; \d of 8 experts a layer in .*", cache.store_reason)
    assert cache.host_nbytes <= needed / 2

    free[0] = needed * 100
    cache = load(checkpoint, expert_ram_gib=needed / 2 / GIB, **options).expert_cache
    assert cache.store == "disk", "all of the free memory is not ours"


def _matches(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None


def test_what_does_not_fit_is_refused_before_loading(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stride = stride_of(hot.pack(checkpoint).path)
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: 3 * stride)
    with pytest.raises(HostMemoryError, match=r"8 experts a layer .* need .*, .* is available"):
        load(checkpoint, expert_store="disk", expert_ram_gib=1)
    unchecked = load(checkpoint, expert_store="disk", expert_ram_gib=1, check_host_memory=False)
    assert unchecked.expert_cache.host_nbytes == 8 * stride
    with pytest.raises(ConfigError, match=r"less than one of each of 2 layers: give at least"):
        load(checkpoint, expert_store="disk", expert_ram_gib=(stride - 1) / GIB)
    smallest = load(checkpoint, expert_store="disk", expert_ram_gib=(stride + 1) / GIB)
    assert torch.equal(logits(smallest), logits(load(checkpoint)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_store": "disk", "cache_mode": "device"}, "page-locked memory: use expert_store"),
        ({"expert_store": "disk", "expert_packing": "packed12"}, "expert_store 'disk'"),
        ({"expert_store": "disk", "expert_ram_gib": 0}, "expert_ram_gib is 0: give"),
        ({"expert_store": "disk", "expert_ram_gib": True}, "expert_ram_gib is True: give"),
        ({"expert_store": "disk", "expert_ram_gib": float("nan")}, "expert_ram_gib is nan: give"),
        ({"expert_store": "disk", "expert_ram_policy": "none"}, "none"),
        ({"expert_store": "ram", "expert_ram_gib": 1}, "expert_ram_gib is for experts on disk"),
        ({"expert_store": "file", "expert_pack": "a"}, "expert_pack is for experts on disk"),
        ({"expert_ram_policy": "lfu"}, "expert_ram_policy is for experts on disk"),
    ],
)
def test_options_that_cannot_take_effect_are_refused(
    options: dict[str, Any], message: str, checkpoint: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(checkpoint, **options)


def test_a_mode_that_auto_cannot_keep_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: 1 << 10)
    with pytest.raises(ConfigError, match="page-locked memory: use expert_store 'ram'"):
        load(checkpoint, expert_store="auto", cache_mode="device")


def test_the_policy_of_the_memory_is_its_own(checkpoint: Path) -> None:
    hot.pack(checkpoint)
    model = load(checkpoint, expert_store="disk", expert_ram_policy="lfu", policy="fifo")
    provider = model.expert_cache.providers[0]
    assert (provider.policy.name, provider.store._policy.name) == ("fifo", "lfu")


def test_a_model_without_experts_has_nothing_to_pack(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    with pytest.raises(UnsupportedModelError):
        hot.pack(tmp_path / "dense")
    assert json.loads((tmp_path / "dense/config.json").read_text())["model_type"] == "llama"
