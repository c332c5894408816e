"""Loading where page-locking is refused: lesser memory, the same logits, or a clear stop.

A fake CUDA runtime locks the stores of a model whose slots are on the CPU.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hotexperts.transformers as hot
from fake_cudart import FakeRuntime
from hotexperts.cache import CPUBackingStore, device_mode, held
from hotexperts.cache.host_memory import PageLockError
from hotexperts.cache.packed_store import PackedBackingStore
from hotexperts.cache.quantised import QuantisedStore
from hotexperts.errors import HostMemoryError
from hotexperts.integrations.transformers import store_maker
from integrations import zoo

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]
MIXED = r"^\S+ KiB page-locked, \S+ KiB (locked|pageable); what is not page-locked is copied direct"


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """One layer of the two may be page-locked."""
    fake = FakeRuntime(num_granted=1)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(store_maker.StoreMaker, "_is_gpu", True)
    monkeypatch.setattr(store_maker, "reserve_bounce", lambda row_nbytes: None)
    return fake


def load(path: Path, **options: Any) -> Any:
    return hot.load(path, expert_cache_size=3, device="cpu", expert_store="ram", **options)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(zoo.sample_ids()).logits


def resident(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype="auto", experts_implementation="grouped_mm"
    )


def test_a_quota_costs_speed_but_no_bits(olmoe: Path, runtime: FakeRuntime) -> None:
    model = load(olmoe)
    cache = model.expert_cache
    assert [p.store.is_pinned for p in cache.providers] == [True, False]
    assert (cache.mode, cache.mode_reason) == ("host", "host: page-locking was refused")
    assert re.match(MIXED, cache.held), cache.held
    assert torch.equal(logits(model), logits(resident(olmoe)))
    assert (len(runtime.locked), runtime.last_error) == (1, 0)


def test_attached_models_step_back_too(olmoe: Path, runtime: FakeRuntime) -> None:
    model = resident(olmoe)
    expected = logits(model)
    hot.attach(model, expert_cache_size=3, device="cpu")
    pinned = [p.store.is_pinned for p in model.expert_cache.providers]
    assert pinned == [True, False]
    assert torch.equal(logits(model), expected)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"cache_mode": "device"}, "cache_mode 'device'"),
        ({"prefetch": "router"}, "prefetch 'router'"),
        ({"cache_mode": "device", "expert_dtype": "int8"}, "cache_mode 'device'"),
    ],
)
def test_who_needs_kernels_is_told(
    options: dict[str, Any],
    name: str,
    olmoe: Path,
    runtime: FakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_mode, "device_obstacle", lambda *args, **how: None)  # as on a GPU
    wanted = (
        rf"^{name} needs page-locked memory, and page-locking .* was refused \(CUDA error 2; .*\): "
        rf"raise the limit .*, or leave that option out$"
    )
    with pytest.raises(HostMemoryError, match=wanted):
        load(olmoe, **options)
    assert (runtime.locked, runtime.last_error) == ({}, 0)


@pytest.mark.parametrize(
    ("num_granted", "kinds", "pinned", "why"),
    [
        (1, [CPUBackingStore, CPUBackingStore], [True, False], "page-locking was refused"),
        (2, [PackedBackingStore, CPUBackingStore], [True, True], "no CUDA device"),
    ],
)
def test_packed_rows_give_way_to_plain_ones(
    num_granted: int,
    kinds: list[type],
    pinned: list[bool],
    why: str,
    olmoe: Path,
    runtime: FakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first grant is for a layer on its way; a layer whose packed rows are refused keeps it."""
    monkeypatch.setattr(store_maker, "packs", lambda *args, **more: True)
    runtime.num_granted = num_granted
    model = load(olmoe)
    made = [p.store for p in model.expert_cache.providers]
    assert [type(store) for store in made] == kinds
    assert [store.is_pinned for store in made] == pinned
    assert model.expert_cache.mode_reason == f"host: {why}"
    assert torch.equal(logits(model), logits(resident(olmoe)))


def test_codes_stay_codes_in_any_memory(
    olmoe: Path, runtime: FakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch makes them plain; the first grant is for the plain rows on their way."""
    fp8 = zoo.build_fp8_checkpoint(tmp_path)
    cases: list[tuple[int, Path, dict[str, Any]]] = [
        (2, olmoe, {"expert_dtype": "int4"}),
        (1, fp8, {"dtype": "bfloat16"}),
    ]
    for num_granted, path, options in cases:
        with monkeypatch.context() as plain:
            plain.setattr(store_maker.StoreMaker, "_is_gpu", False)
            expected = logits(load(path, **options))
        runtime.num_granted = num_granted
        model = load(path, **options)
        cache = model.expert_cache
        made = [p.store for p in cache.providers]
        assert [type(store) for store in made] == [QuantisedStore] * 2
        assert [store.is_pinned for store in made] == [True, False]
        assert cache.mode_reason == "host: page-locking was refused"
        assert re.match(MIXED + r"ly \(CUDA error 2; ", cache.held), cache.held
        assert torch.equal(logits(model), expected)
        del model, cache, made


def test_bounce_rows_are_reserved_before_the_quota_is_used_up(
    olmoe: Path, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def reserve(row_nbytes: int) -> object:
        seen.append(len(runtime.locked))
        return object()

    monkeypatch.setattr(store_maker, "reserve_bounce", reserve)
    monkeypatch.setattr(held, "measure", lambda store, device: 1.0 if store.bounce is None else 2)
    cache = load(olmoe).expert_cache
    assert seen == [0]
    assert "copied through page-locked rows at 2.0 GB/s" in cache.held
    assert [p.store.bounce is None for p in cache.providers] == [True, False]


def test_no_bounce_where_even_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(row_nbytes: int) -> None:
        raise PageLockError(row_nbytes, "CUDA error 2")

    monkeypatch.setattr(held, "PinnedBounce", refuse)
    assert held.reserve_bounce(4096) is None
