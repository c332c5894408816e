"""The device-managed provider against the host-managed one: rows, residents and counters."""

from __future__ import annotations

import gc
import itertools
import os
import random
import weakref
from collections.abc import Sequence

import pytest
import torch

from hotexperts.cache import CachedWeightProvider, CPUBackingStore, StreamBanks, guided
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.cache.packed_store import PackedBackingStore
from hotexperts.cache.padding import TokenCount
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
        if wave.pairs is not None:
            assert torch.equal(wave.pairs.cpu(), pairs)
        if wave.part is not None and wave.expert_map is not None:
            rows = wave.expert_map.cpu()[ids.flatten().clamp(min=0).cpu()]
            assert torch.equal(rows.where(ids.flatten().cpu() >= 0, -1).long(), slots.long())
        bias = wave.tensors.bias.cpu()[slots[pairs]]
        weights = wave.tensors.w.float().cpu()[slots[pairs]]
        assert torch.equal(weights.amin((1, 2)), bias)
        assert torch.equal(weights.amax((1, 2)), bias)
        seen[pairs] = bias - 1
        times[pairs] += 1
    assert torch.equal(times, (ids.flatten() >= 0).long().cpu())
    return seen.tolist()


def poison(device: DeviceWeightProvider) -> None:
    """Bytes that are a bf16 NaN, and no expert's bias."""
    device.buffer.fill_(-1)
    for bank in device._banks.buffers if device._banks else []:
        bank.fill_(255)  # the ledger still says that the banks hold nothing


@pytest.mark.parametrize("policy", DEVICE_POLICIES)
def test_device_equals_host(policy: str) -> None:
    draw = random.Random(policy)
    store = make_store()
    host = CachedWeightProvider(store, 10, policy=policy, device="cpu")
    device = DeviceWeightProvider(store, 10, policy=policy, device=DEVICE)
    poison(device)
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
        assert counted(device) == counted(host)


def counted(provider: DeviceWeightProvider | CachedWeightProvider) -> dict[str, int]:
    """The counters but for waves, which the host leaves out where they turn out to be empty, and
    for bytes, of which a prefill moves fewer where a bank still holds a row."""
    found = provider.stats.as_dict()
    assert found.pop("waves") > 0
    assert 0 < found.pop("bytes_moved") <= found["misses"] * provider.store.layout.nbytes
    return found


@pytest.mark.parametrize(
    ("policy", "capacity", "how"),
    [
        ("lru", 1, "engine"),
        ("lru", 7, "kernel"),
        ("lru", 7, "capture"),
        ("auto", 13, "engine"),
        ("adv", 7, "engine"),
        ("adv", 7, "capture"),
        ("lru", 24, "engine"),
    ],
)
def test_calls_over_capacity_equal_the_host(
    policy: str, capacity: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode, prefill and far too many ids, in any order: bytes, residents and counters.

    A prefill's rows come by the copy engine, by kernels, or as under capture, without the host.
    """
    monkeypatch.setattr(guided, "ENGINE_MIN_NBYTES", {"engine": 0}.get(how, 1 << 30))
    if how == "capture":
        monkeypatch.setattr(DeviceWeightProvider, "_host_may_wait", lambda self: False)
    draw = random.Random(f"{policy}{capacity}")
    store = make_store()
    host = CachedWeightProvider(store, capacity, policy=policy, device="cpu")
    device = DeviceWeightProvider(store, capacity, policy=policy, device=DEVICE, tells_pairs=True)
    poison(device)
    for _ in range(6):
        num_tokens = draw.choice([1, 2, 5, 9, 150])
        popular = draw.sample(range(NUM_EXPERTS), draw.randint(1, NUM_EXPERTS))
        ids = [[draw.choice([*popular, -1]) for _ in range(4)] for _ in range(num_tokens)]
        topk_ids = torch.tensor(ids, dtype=draw.choice([torch.int32, torch.int64]))
        prefill = draw.random() < 0.4
        expected = [float(e) for row in ids for e in row]
        assert read(device, topk_ids.to(DEVICE), prefill=prefill) == expected
        assert read(host, topk_ids, prefill=prefill) == expected
        assert device.slot_of == host.slots.slot_of
        assert counted(device) == counted(host)


@pytest.mark.parametrize("engine_min_nbytes", [0, 1 << 30])
def test_the_next_layers_first_experts_come_ahead(
    engine_min_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill of nearly all experts fills the banks for the layer that follows."""
    monkeypatch.setattr(guided, "ENGINE_MIN_NBYTES", engine_min_nbytes)
    layers = three_layers()
    everyone = torch.arange(NUM_EXPERTS, device=DEVICE).view(-1, 4)
    some = everyone[:3]
    copied = [0, 0, 0]
    for asked, expected in (
        ([everyone, everyone, everyone], [19, 19, 19]),  # two parts of 8 come ahead, none twice
        ([some, everyone, some], [12, 19, 16]),  # 12 of these 16 were not in vain
        ([some, some, some], [12, 12, 12]),  # what few ask for says nothing of the next
    ):
        for index, ids in enumerate(asked):
            values = [float(e) for e in ids.flatten().tolist()]
            assert read(layers[index], ids, prefill=True) == values
        now = [copies_of(layer) for layer in layers]
        assert [new - old for new, old in zip(now, copied, strict=True)] == expected
        copied = now


def test_what_comes_ahead_comes_as_its_own_layer_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers are packed each by itself: only kernels unpack, whoever's prefill asks them to."""
    monkeypatch.setattr(guided, "ENGINE_MIN_NBYTES", 0)
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**15), 2**15, (NUM_EXPERTS, 8192), generator=generator)
    odd = odd.to(torch.int16)
    even = torch.randn(NUM_EXPERTS, 8192, generator=generator).bfloat16().view(torch.int16)
    weights = [odd, even, odd, even]
    stores = [
        PackedBackingStore.from_tensors(
            {"w": w.view(torch.bfloat16)}, torch.device("cpu"), pin=DEVICE == "cuda"
        )
        for w in weights
    ]
    assert [store.form.is_packed for store in stores] == [False, True, False, True]
    for store in stores[1::2]:
        monkeypatch.setattr(store, "copy_into", None)
    layers = in_a_row(stores)
    everyone = torch.arange(NUM_EXPERTS, device=DEVICE).view(-1, 4)
    for layer, wanted in zip(layers, weights, strict=True):
        served = 0
        for wave in layer.waves(everyone, prefill=True):
            rows = wave.topk_ids.flatten().long()
            found = wave.tensors.w[rows[rows >= 0]].cpu().view(torch.int16)
            assert torch.equal(found, wanted[(rows >= 0).cpu()])
            served += len(found)
        assert served == NUM_EXPERTS
        assert layer.stats.bytes_moved == 19 * layer.store.form.nbytes


def test_nothing_holds_a_provider_that_is_dropped() -> None:
    """Its slots are free at once, for example for larger ones."""
    provider = DeviceWeightProvider(make_store(), 5, device=DEVICE)
    everyone = torch.arange(NUM_EXPERTS, device=DEVICE).view(-1, 4)
    read(provider, everyone, prefill=True)
    is_there = weakref.ref(provider)
    gc.disable()
    try:
        del provider
        assert is_there() is None
    finally:
        gc.enable()


def three_layers() -> list[DeviceWeightProvider]:
    return in_a_row([make_store() for _ in range(3)])


def in_a_row(
    stores: Sequence[CPUBackingStore | PackedBackingStore],
) -> list[DeviceWeightProvider]:
    """One after another over the same banks; the experts 19 to 23 are in their slots."""
    banks = StreamBanks(stores[0].layout, 8, torch.device(DEVICE))
    layers = [DeviceWeightProvider(s, 5, device=DEVICE, banks=banks) for s in stores]
    for this, following in itertools.pairwise(layers):
        this.next_provider = following
    for layer in layers:
        layer.prepare(torch.tensor([[19, 20, 21, 22, 23]], device=DEVICE))
        layer.reset_stats()
    return layers


def copies_of(layer: DeviceWeightProvider) -> int:
    return layer.stats.bytes_moved // layer.store.layout.nbytes


def test_what_came_ahead_is_not_read_after_others_used_the_bank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prefill breaks off before the next layer, and a call without the host comes between."""
    layers = three_layers()
    everyone = torch.arange(NUM_EXPERTS, device=DEVICE).view(-1, 4)
    read(layers[0], everyone, prefill=True)
    with monkeypatch.context() as patched:
        patched.setattr(DeviceWeightProvider, "_host_may_wait", lambda self: False)
        read(layers[2], everyone[:2], prefill=True)  # eight experts in a part: into bank 0 alone
    expected = [float(e) for e in range(NUM_EXPERTS)]
    assert read(layers[1], everyone, prefill=True) == expected
    assert copies_of(layers[1]) == 16 + 11  # bank 1 still held what it should


def test_a_prefill_that_finds_all_experts_takes_one_wave() -> None:
    """The host waited, and knows."""
    provider = DeviceWeightProvider(make_store(), 10, device=DEVICE)
    ids = torch.arange(8, device=DEVICE).view(-1, 4)
    for _ in range(2):
        (wave,) = provider.waves(ids, prefill=True)
        assert wave.part is None
    assert provider.stats.waves == 2
    assert provider.stats.misses == 8


def test_what_the_host_puts_into_a_shared_bank_is_no_other_layers() -> None:
    """Each finds its own rows in the banks, or copies them."""
    store = make_store()
    banks = StreamBanks(store.layout, 8, torch.device(DEVICE))
    host = CachedWeightProvider(store, 5, policy="lru", device=DEVICE, banks=banks)
    shifted = CPUBackingStore.from_tensors(
        {"w": store.tensors.w + 100, "bias": store.tensors.bias + 100}, pin=DEVICE == "cuda"
    )
    device = DeviceWeightProvider(shifted, 5, policy="lru", device=DEVICE, banks=banks)
    everyone = torch.arange(NUM_EXPERTS, device=DEVICE).view(-1, 4)
    for _ in range(2):
        assert read(device, everyone, prefill=True) == [100.0 + e for e in range(NUM_EXPERTS)]
        assert read(host, everyone, prefill=True) == [float(e) for e in range(NUM_EXPERTS)]


def test_the_number_of_waves_follows_from_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Banks of 8 rows; what is needed at run time changes nothing, where the host must not wait."""
    monkeypatch.setattr(DeviceWeightProvider, "_host_may_wait", lambda self: False)
    store = make_store()
    for policy, capacity, num_tokens, prefill, num_waves in (
        ("lru", 10, 2, False, 1),  # 8 ids fit
        ("lru", 10, 4, False, 2),  # 16 ids: at most 6 pass by
        ("lru", 10, 400, False, 3),  # at most 24 - 10
        ("lru", 10, 4, True, 3),  # no slot may be taken: all 14 that may be absent
        ("auto", 10, 2, False, 1),  # 8 ids for 10 slots: nobody is turned away
        ("lru", 24, 400, True, 1),  # everything is resident
    ):
        provider = DeviceWeightProvider(store, capacity, policy=policy, device=DEVICE)
        ids = torch.zeros(num_tokens, 4, dtype=torch.int64, device=DEVICE)
        assert len(list(provider.waves(ids, prefill=prefill))) == num_waves
        assert provider.stats.waves == num_waves


def test_a_policy_may_turn_experts_away_where_a_wave_pays() -> None:
    """From 32 ids on, and where 8 tenths of them are more than AUTO's 6 tenths of the slots."""
    store = make_store(64)
    for capacity, num_tokens, num_waves in ((60, 11, 1), (60, 12, 2), (34, 7, 1), (34, 8, 2)):
        provider = DeviceWeightProvider(store, capacity, policy="auto", device=DEVICE)
        ids = torch.zeros(num_tokens, 4, dtype=torch.int64, device=DEVICE)
        assert len(list(provider.waves(ids))) == num_waves


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


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["lru", "adv"])
@pytest.mark.parametrize("prefill", [False, True])
def test_captured_waves_equal_eager(policy: str, prefill: bool) -> None:
    """The side stream forks and joins inside the graph; each replay serves other ids."""
    store = make_store()
    eager, captured = (
        DeviceWeightProvider(store, 5, policy=policy, device="cuda") for _ in range(2)
    )
    ids = torch.zeros(5, 4, dtype=torch.int64, device="cuda")

    def bias_of(provider: DeviceWeightProvider) -> torch.Tensor:
        found = torch.full((5, 4), -1.0, device="cuda")
        for wave in provider.waves(ids, prefill=prefill):
            is_here = wave.topk_ids >= 0
            value = wave.tensors.bias[wave.topk_ids.clamp(min=0)]
            found = torch.where(is_here, value, found)
        return found

    bias_of(captured)
    captured.reset()
    poison(captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = bias_of(captured)
    for _ in range(200):
        ids.copy_(torch.randint(0, NUM_EXPERTS, (5, 4)))
        graph.replay()
        assert torch.equal(found.long() - 1, ids)
        assert torch.equal(bias_of(eager), found)
        assert captured.slot_of == eager.slot_of
    ours, theirs = captured.stats.as_dict(), eager.stats.as_dict()
    if prefill:  # the host waited for the eager one's, and leaves out what is not needed
        assert ours.pop("waves") > theirs.pop("waves")
        assert ours.pop("bytes_moved") >= theirs.pop("bytes_moved")
    assert ours == theirs


@pytest.mark.gpu
def test_a_graph_waits_for_what_a_broken_off_call_copies_ahead() -> None:
    """An eager prefill dies between two layers: its copies into the banks are still under way."""
    provider = DeviceWeightProvider(make_store(), 5, device="cuda")
    ids = torch.arange(20, device="cuda").view(5, 4)

    def bias_of() -> torch.Tensor:
        found = torch.full((5, 4), -1.0, device="cuda")
        for wave in provider.waves(ids):
            value = wave.tensors.bias[wave.topk_ids.clamp(min=0)]
            found = torch.where(wave.topk_ids >= 0, value, found)
        return found

    bias_of()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = bias_of()
    graph.replay()
    banks = provider._banks
    assert banks is not None
    with banks.lane.copying_ahead(0):
        torch.cuda._sleep(200_000_000)  # 0.1 s
        banks.buffers[0].fill_(255)
    copied = torch.cuda.Event()
    copied.record(banks.lane._streams[0])
    graph.replay()
    torch.cuda.current_stream().synchronize()
    assert copied.query()
    assert torch.equal(found.long() - 1, ids)


@pytest.mark.gpu
def test_padding_of_a_replay_asks_for_nothing() -> None:
    """A graph for five tokens serves two of them, then four; the eager call has no padding."""
    provider = DeviceWeightProvider(make_store(), 20, device="cuda")
    provider.token_count = TokenCount(torch.device("cuda"))
    ids = torch.arange(20, device="cuda").view(5, 4)
    provider.prepare(ids)
    provider.reset()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = provider.prepare(ids)
    for num_tokens, misses in ((2, 8), (4, 16)):
        provider.token_count.expect(num_tokens)
        graph.replay()
        assert provider.stats.misses == misses
        slots = result.topk_ids.flatten().tolist()
        assert len(set(slots[: 4 * num_tokens])) == 4 * num_tokens
        assert set(slots[4 * num_tokens :]) == {0}
    provider.prepare(ids)
    assert provider.stats.misses == 20


def test_calls_outside_of_graphs_have_no_padding() -> None:
    provider = DeviceWeightProvider(make_store(), 20, device=DEVICE)
    provider.token_count = TokenCount(torch.device(DEVICE))
    provider.token_count.expect(1)
    provider.prepare(torch.arange(8, device=DEVICE).view(2, 4))
    assert provider.stats.misses == 8
