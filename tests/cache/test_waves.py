"""Calls over capacity: every pair once, right bytes in every wave, nothing stale, nothing lost."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotexperts.cache import CachedWeightProvider, CPUBackingStore, StreamBanks, store
from hotexperts.cache.turn import Turn
from hotexperts.errors import ConcurrentUseError, ConfigError
from hotexperts.policy import POLICIES


def make_store(num_experts: int, *, pin: bool = False) -> CPUBackingStore:
    """Expert e's tensors are filled with e + 1, so that a wrong row is seen by its value."""
    values = torch.arange(1.0, num_experts + 1)
    return CPUBackingStore.from_tensors(
        {"w": values.view(-1, 1, 1).expand(-1, 3, 2).bfloat16(), "bias": values.clone()}, pin=pin
    )


def poison(provider: CachedWeightProvider, banks: StreamBanks | None) -> None:
    for group in [provider.slots.tensors, *(banks.tensors if banks else [])]:
        for tensor in group:
            tensor.fill_(float("nan"))


def served(provider: CachedWeightProvider, topk_ids: torch.Tensor, **options: bool) -> list[float]:
    """What each pair read, summed over waves; each must be served exactly once."""
    seen = torch.zeros(topk_ids.numel())
    times = torch.zeros(topk_ids.numel(), dtype=torch.int64)
    for wave in provider.waves(topk_ids, **options):
        rows = wave.topk_ids.flatten()
        pairs = torch.arange(rows.numel()) if wave.pairs is None else wave.pairs.cpu()
        assert torch.equal((rows.cpu() >= 0).nonzero().flatten(), pairs)
        slots = rows.cpu()[pairs]
        values = wave.tensors.bias.cpu()[slots]
        assert torch.equal(
            wave.tensors.w.cpu()[slots].float().amax((1, 2)), values.bfloat16().float()
        )
        seen[pairs] += values
        times[pairs] += 1
    expected = (topk_ids.flatten() >= 0).long().cpu()
    assert torch.equal(times, expected), times
    return (seen - 1).tolist()


@settings(max_examples=150)
@given(
    st.data(),
    st.sampled_from(POLICIES.names()),
    st.integers(1, 24),
)
def test_every_pair_is_served_once_with_its_own_expert(
    data: st.DataObject, policy: str, num_experts: int
) -> None:
    capacity = data.draw(st.integers(1, num_experts))
    provider = CachedWeightProvider(make_store(num_experts), capacity, policy=policy)
    poison(provider, provider._banks)
    for _ in range(data.draw(st.integers(1, 5))):
        experts = data.draw(st.lists(st.integers(-1, num_experts - 1), max_size=30))
        topk_ids = torch.tensor(experts, dtype=torch.int64)
        prefill = data.draw(st.booleans())
        assert served(provider, topk_ids, prefill=prefill) == [max(e, -1) for e in experts]
        provider.slots.residency.check()


def test_waves_on_a_gpu_read_the_right_rows(device: str) -> None:
    provider = CachedWeightProvider(make_store(24, pin=device == "cuda"), 5, device=device)
    poison(provider, provider._banks)
    for start in range(4):
        topk_ids = torch.arange(start, 24, device=device)
        assert served(provider, topk_ids) == topk_ids.tolist()


def test_a_prefill_leaves_the_decode_set_in_place() -> None:
    provider = CachedWeightProvider(make_store(16), 4)
    provider.prepare(torch.tensor([0, 1, 2, 3]))
    served(provider, torch.arange(16), prefill=True)
    assert sorted(provider.slots.residency.residents) == [0, 1, 2, 3]
    assert provider.stats.bypasses == 12


def test_a_prefill_within_capacity_still_evicts_nobody() -> None:
    provider = CachedWeightProvider(make_store(16), 4)
    provider.prepare(torch.tensor([0, 1, 2, 3]))
    assert served(provider, torch.tensor([4, 5]), prefill=True) == [4, 5]
    assert sorted(provider.slots.residency.residents) == [0, 1, 2, 3]


def test_a_decode_over_capacity_serves_residents_first() -> None:
    provider = CachedWeightProvider(make_store(16), 4)
    provider.prepare(torch.tensor([12, 13, 14, 15]))
    first = next(provider.waves(torch.arange(8, 16)))
    assert first.pairs is not None
    assert first.pairs.tolist() == [4, 5, 6, 7]


def test_banks_can_be_shared_by_layers() -> None:
    store = make_store(16)
    banks = StreamBanks(store.layout, 4, torch.device("cpu"))
    layers = [CachedWeightProvider(store, 3, banks=banks) for _ in range(2)]
    for provider in layers * 2:
        assert served(provider, torch.arange(16)) == list(range(16))


def test_counts_after_an_over_capacity_call() -> None:
    provider = CachedWeightProvider(make_store(20), 3)
    served(provider, torch.arange(20))
    stats = provider.stats
    assert (stats.calls, stats.hits, stats.misses, stats.bypasses) == (1, 0, 20, 17)
    assert stats.waves == 1 + 6  # three admitted, then 17 through banks of 3 rows
    assert stats.bytes_moved == 20 * provider.store.layout.nbytes


def test_an_id_that_no_expert_has_is_an_error() -> None:
    provider = CachedWeightProvider(make_store(4), 2)
    with pytest.raises(ConfigError, match="expert id 4 in a layer of 4 experts: give 0 to 3"):
        provider.prepare(torch.tensor([0, 4]))
    for dtype in (torch.uint8, torch.float32):
        with pytest.raises(ConfigError, match="give int32 or int64"):
            provider.prepare(torch.tensor([0], dtype=dtype))
    assert served(provider, torch.tensor([0])) == [0]  # the lock is free again


def test_every_negative_id_is_nobody() -> None:
    provider = CachedWeightProvider(make_store(4), 2)
    assert provider.prepare(torch.tensor([-2, 1, -7])).topk_ids.tolist() == [-1, 0, -1]


def test_an_interrupt_at_any_line_leaves_nothing_stale() -> None:
    """Raises at the n-th traced line of a call, for every n, and then asks for everything."""
    for over_capacity in (False, True):
        for line in range(0, 400, 9):
            provider = CachedWeightProvider(make_store(12), 4)
            served(provider, torch.tensor([0, 1, 2]))
            wanted = torch.arange(2, 12) if over_capacity else torch.tensor([2, 3, 4])
            finished = interrupted_at(line, lambda p=provider, w=wanted: served(p, w))
            gc.collect()  # closes a generator that the traceback kept
            provider.slots.residency.check()
            assert served(provider, torch.tensor([3, 4, 2])) == [3, 4, 2]
            assert served(provider, torch.arange(12)) == list(range(12))
            if finished:
                break


def interrupted_at(line: int, call: Callable[[], object]) -> bool:
    """Run `call` with a KeyboardInterrupt at a line of the cache's code; whether it finished."""
    left = line

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if "hotexperts/cache" not in frame.f_code.co_filename and (
            "hotexperts/residency" not in frame.f_code.co_filename
        ):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(None)
    return left > 0


def test_a_second_thread_is_refused() -> None:
    provider = CachedWeightProvider(make_store(8), 2)
    waves = provider.waves(torch.arange(8))
    next(waves)
    caught: list[BaseException] = []

    def intrude() -> None:
        try:
            provider.prepare(torch.tensor([0]))
        except ConcurrentUseError as error:
            caught.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    waves.close()
    assert len(caught) == 1
    provider.prepare(torch.tensor([0]))


def test_layers_that_share_banks_share_their_turn() -> None:
    """A thread inside one layer keeps others out of every layer of the model."""
    store = make_store(16)
    banks = StreamBanks(store.layout, 4, torch.device("cpu"))
    first, second = (CachedWeightProvider(store, 3, banks=banks) for _ in range(2))
    with pytest.raises(ConfigError, match="belong to another turn"):
        CachedWeightProvider(store, 3, banks=banks, turn=Turn(torch.device("cpu")))
    waves = first.waves(torch.arange(16))
    next(waves)
    with pytest.raises(ConcurrentUseError, match="two threads"):
        next(second.waves(torch.arange(16)))
    waves.close()
    assert served(second, torch.arange(16)) == list(range(16))


class FlakyStore:
    """Fails on one expert; everything else is the store behind it."""

    def __init__(self, store: CPUBackingStore, bad: int) -> None:
        self.layout, self.num_experts, self.host_nbytes = store.layout, store.num_experts, 0
        self._store, self.bad = store, bad

    def copy_into(self, expert: int, tensors: list[torch.Tensor]) -> None:
        if expert == self.bad:
            tensors[0].fill_(7)  # a short read: part of the row is overwritten
            raise OSError("disk went away")
        self._store.copy_into(expert, tensors)


@pytest.mark.parametrize("over_capacity", [False, True])
def test_a_row_that_does_not_arrive_is_never_read(over_capacity: bool) -> None:
    store = FlakyStore(make_store(12), bad=3)
    provider = CachedWeightProvider(store, 4)
    assert served(provider, torch.tensor([0, 1])) == [0, 1]
    wanted = torch.arange(2, 12) if over_capacity else torch.tensor([2, 3, 4])
    with pytest.raises(OSError, match="went away"):
        served(provider, wanted)
    provider.slots.residency.check()
    assert 3 not in provider.slots.residency.residents
    store.bad = -1
    assert served(provider, torch.tensor([2, 3, 4])) == [2, 3, 4]
    assert served(provider, torch.arange(12)) == list(range(12))


def test_reset_forgets_slots_history_and_counters() -> None:
    provider = CachedWeightProvider(make_store(8), 2)
    served(provider, torch.arange(8))
    provider.reset()
    assert provider.stats.as_dict() == dict.fromkeys(provider.stats.as_dict(), 0)
    assert list(provider.slots.residency.residents) == []


def test_an_empty_call_is_one_empty_wave() -> None:
    provider = CachedWeightProvider(make_store(8), 2)
    assert served(provider, torch.empty(0, 2, dtype=torch.int64)) == []
    assert served(provider, torch.full((2, 2), -1)) == [-1] * 4


@pytest.mark.parametrize("chunk_nbytes", [1, 1 << 10, 1 << 20])
def test_a_store_takes_tensors_of_any_device(
    device: str, chunk_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CHUNK_NBYTES", chunk_nbytes)
    tensors = {
        "w": torch.randn(7, 5, 6).bfloat16(),
        "scale": torch.arange(7, dtype=torch.float32),
        "packed": torch.randint(0, 255, (7, 3), dtype=torch.uint8),
    }
    found = CPUBackingStore.from_tensors({n: t.to(device) for n, t in tensors.items()})
    for name, tensor in tensors.items():
        assert torch.equal(getattr(found.tensors, name), tensor)
