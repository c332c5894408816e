"""Option `packing` of the vLLM plug-in, as far as it goes without a GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hotexperts.cache import CPUBackingStore
from hotexperts.cache.packed_store import PackedBackingStore
from hotexperts.errors import ConfigError
from hotexperts.integrations.vllm import options, refusals, stores

E, CPU = 6, torch.device("cpu")


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w13_weight": (E, 64, 128), "w2_weight": (E, 128, 32)}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: (tensor * 0.05).bfloat16() for name, tensor in drawn.items()}


def stored(
    packing: str, given: dict[str, torch.Tensor], plain: CPUBackingStore | None = None
) -> stores.Store:
    cache = options.parse({"size": 4, "options": {"packing": packing}}).cache
    return stores.store_of(cache, given, CPU, plain, capacity=4)


def test_the_option_reaches_the_cache() -> None:
    for name in ("none", "packed12", "auto"):
        text = json.dumps({"packing": name})
        assert options.parse({"size": 4, "options": text}).cache.packing == name
    assert options.parse({"size": 4}).cache.packing == "auto"


@pytest.mark.parametrize("is_in_parts", [False, True])
def test_a_packed_layer_has_every_bit(is_in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what decides there is answered by hand, the rest is the code that runs there."""
    asked: list[tuple[str, bool]] = []

    def packs(cache: Any, mode: Any, device: torch.device, *, is_full: bool) -> bool:
        asked.append((cache.packing, is_full))
        return True

    monkeypatch.setattr(stores, "packs", packs)
    given = tensors()
    plain = CPUBackingStore.from_tensors(given, pin=False)
    store = stored("packed12", given, plain if is_in_parts else None)
    assert isinstance(store, PackedBackingStore)
    assert asked == [("packed12", False)]
    assert store.host_nbytes < 0.85 * plain.host_nbytes
    for expert in range(E):
        found = [torch.empty_like(tensor[expert]) for tensor in given.values()]
        store.copy_into(expert, found)
        for part, tensor in zip(found, given.values(), strict=True):
            assert torch.equal(part, tensor[expert])


def test_on_a_cpu_auto_is_plain_and_packed_is_refused_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for packing in ("none", "auto"):
        store = stored(packing, tensors())
        assert type(store) is CPUBackingStore
    plain = CPUBackingStore.from_tensors(tensors(), pin=False)
    assert stored("auto", tensors(), plain) is plain
    monkeypatch.setattr(refusals, "check_version", lambda: None)
    model = SimpleNamespace(get_num_experts=lambda: E, model="m", enable_sleep_mode=False)
    parallel = SimpleNamespace(enable_expert_parallel=False)
    config = SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        device_config=SimpleNamespace(device_type="cpu"),
    )
    wanted = options.parse({"size": 4, "options": {"packing": "packed12"}})
    with pytest.raises(
        ConfigError, match=r"^--moe-expert-cache-options: packing is 'packed12'.*CP"
    ):
        refusals.check_engine(config, wanted)


def test_packing_of_what_is_not_bfloat16_is_refused() -> None:
    given = {name: tensor.half() for name, tensor in tensors().items()}
    message = r"packing: expert_packing 'packed12' packs bfloat16, .* are float16: use .*'none'"
    with pytest.raises(ConfigError, match=message):
        stored("packed12", given)
    assert type(stored("auto", given)) is CPUBackingStore
