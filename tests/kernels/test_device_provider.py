"""The device-managed provider against the host-managed one: rows, residents and counters."""

from __future__ import annotations

import os
import random

import pytest
import torch

from hotexperts.cache import CachedWeightProvider, CPUBackingStore
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.errors import ConfigError, ExpertCacheOverflow
from hotexperts.kernels.plan import DEVICE_POLICIES

pytest.importorskip("triton")
pytestmark = pytest.mark.interpret
DEVICE = "cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu"
NUM_EXPERTS = 24


def make_store(
    num_experts: int = NUM_EXPERTS, dtype: torch.dtype = torch.bfloat16
) -> CPUBackingStore:
    values = torch.arange(1.0, num_experts + 1)
    weights = values.view(-1, 1, 1).expand(-1, 4, 6).to(dtype)
    return CPUBackingStore.from_tensors({"w": weights, "bias": values}, pin=DEVICE == "cuda")


def read(
    provider: DeviceWeightProvider | CachedWeightProvider, ids: torch.Tensor, **how: bool
) -> list[float]:
    """The value each pair reads, -1 for ignored pairs; each pair must be served exactly once."""
    seen = torch.full((ids.numel(),), -1.0)
    times = torch.zeros(ids.numel(), dtype=torch.int64)
    for wave in provider.waves(ids, **how):
        slots = wave.topk_ids.flatten().cpu()
        pairs = (slots >= 0).nonzero().flatten()
        bias = wave.tensors.bias.cpu()[slots[pairs]]
        weights = wave.tensors.w.float().cpu()[slots[pairs]]
        assert torch.equal(weights.amin((1, 2)), bias)
        assert torch.equal(weights.amax((1, 2)), bias)
        seen[pairs] = bias - 1
        times[pairs] += 1
    assert torch.equal(times, (ids.flatten() >= 0).long().cpu())
    return seen.tolist()


@pytest.mark.parametrize("policy", DEVICE_POLICIES)
def test_device_equals_host(policy: str) -> None:
    draw = random.Random(policy)
    store = make_store()
    host = CachedWeightProvider(store, 10, policy=policy, device="cpu")
    device = DeviceWeightProvider(store, 10, policy=policy, device=DEVICE)
    device.buffer.fill_(-1)  # poison: bf16 NaN, and no expert's bias
    for _ in range(15):
        ids = [[draw.randrange(NUM_EXPERTS) for _ in range(4)] for _ in range(2)]
        ids[0][draw.randrange(4)] = draw.choice([-1, 3])
        topk_ids = torch.tensor(ids)
        expected = [float(e) for row in ids for e in row]
        assert host.prepare(topk_ids).topk_ids.tolist() == (
            device.prepare(topk_ids.to(DEVICE)).topk_ids.tolist()
        )
        assert read(device, topk_ids.to(DEVICE)) == expected
        read(host, topk_ids)
        assert device.slot_of == host.slots.slot_of
        assert device.stats == host.stats


def test_a_prefill_fills_free_slots_and_evicts_nobody() -> None:
    device = DeviceWeightProvider(make_store(), 6, device=DEVICE)
    device.prepare(torch.tensor([[20, 21]], device=DEVICE))
    ids = torch.arange(16, device=DEVICE).view(-1, 2)
    assert read(device, ids, prefill=True) == [float(i) for i in range(16)]
    slot_of = device.slot_of
    assert slot_of[20] >= 0
    assert slot_of[21] >= 0
    assert sum(slot >= 0 for slot in slot_of) == 6
    assert (device.stats.misses, device.stats.bypasses) == (2 + 16, 12)
    assert device.stats.bytes_moved == 18 * device.store.layout.nbytes


def test_more_ids_than_one_launch_takes() -> None:
    ids = torch.randint(0, NUM_EXPERTS, (400, 4), device=DEVICE)
    expected = [float(e) for e in ids.flatten().tolist()]
    for capacity in (NUM_EXPERTS, 5):
        provider = DeviceWeightProvider(make_store(), capacity, device=DEVICE)
        assert read(provider, ids) == expected
        assert read(provider, ids, prefill=True) == expected


def test_overflow_is_judged_by_the_shape() -> None:
    provider = DeviceWeightProvider(make_store(), 3, device=DEVICE)
    with pytest.raises(ExpertCacheOverflow, match="4 distinct experts needed in one call, 3 slots"):
        provider.prepare(torch.zeros(2, 2, dtype=torch.int64, device=DEVICE))


def test_reset_empties_everything() -> None:
    provider = DeviceWeightProvider(make_store(), 8, policy="lfu", device=DEVICE)
    fresh = provider.kernel.state.clone()
    read(provider, torch.arange(8, device=DEVICE).view(2, 4))
    provider.reset()
    end = provider.plan.scratch
    assert torch.equal(provider.kernel.state[:end], fresh[:end])
    assert provider.stats.calls == 0


def test_what_no_kernel_can_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy 'slru' has no kernel: choose one of adv, auto"):
        DeviceWeightProvider(make_store(), 4, policy="slru", device=DEVICE)
    with pytest.raises(ConfigError, match="0 slots for 24 experts"):
        DeviceWeightProvider(make_store(), 0, device=DEVICE)
    odd = CPUBackingStore.from_tensors({"w": torch.zeros(4, 3, dtype=torch.bfloat16)})
    with pytest.raises(ConfigError, match=r"tensors \['w'\] of an expert are no multiple of 4"):
        DeviceWeightProvider(odd, 2, device="cpu")


@pytest.mark.gpu
def test_captured_replays_equal_eager() -> None:
    store = make_store()
    eager = DeviceWeightProvider(store, 10, device="cuda")
    captured = DeviceWeightProvider(store, 10, device="cuda")
    ids = torch.zeros(2, 4, dtype=torch.int64, device="cuda")
    captured.prepare(ids)
    captured.reset()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = captured.prepare(ids)
        bias = result.tensors.bias[result.topk_ids]
    for _ in range(200):
        ids.copy_(torch.randint(0, NUM_EXPERTS, (2, 4)))
        graph.replay()
        expected = eager.prepare(ids)
        assert torch.equal(result.topk_ids, expected.topk_ids)
        assert torch.equal(bias.long() - 1, ids)
    assert captured.stats == eager.stats
