"""Experts on disk through a cache of rows in memory: right bytes, whatever happens."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.packs import NUM_EXPERTS, blank, equal, failing, make_pack
from hotexperts.cache import CachedWeightProvider, CPUBackingStore, DiskBackingStore
from hotexperts.cache.pack_file import PackFile
from hotexperts.errors import CheckpointError, StorageError, UnknownNameError
from hotexperts.policy import POLICIES


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, list[CPUBackingStore]]:
    return tmp_path / "a.pack", make_pack(tmp_path / "a.pack")


def test_rows_that_are_in_memory_are_not_read_again(
    made: tuple[Path, list[CPUBackingStore]],
) -> None:
    """A B, then A C at two rows under LRU: A hits, B leaves; then B is read again."""
    path, stores = made
    store = DiskBackingStore(PackFile(path), 0, 2)
    tensors = blank(stores[0])
    for experts in ([0, 1], [0, 2], [1]):
        store.expect(experts)
        for expert in experts:
            store.copy_into(expert, tensors)
            assert equal(tensors, stores[0], expert)
    counts = store.counts
    assert (counts.ram_hits, counts.disk_reads, counts.disk_bytes) == (1, 4, 4 * 8192)
    assert store.host_nbytes == 2 * 8192
    store.reset_counts()
    store.copy_into(1, tensors)  # which nobody announced
    assert (store.counts.ram_hits, store.counts.disk_reads) == (1, 0)
    store.reset()
    store.copy_into(1, tensors)
    assert (store.counts.ram_hits, store.counts.disk_reads) == (0, 1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_reads_with_threads_of_its_own(
    made: tuple[Path, list[CPUBackingStore]],
) -> None:
    path, stores = made
    store = DiskBackingStore(PackFile(path), 0, 2)
    for expert in range(NUM_EXPERTS):  # the threads begin
        store.copy_into(expert, blank(stores[0]))
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends what would wait for ever
        is_equal = False
        try:
            tensors = blank(stores[0])
            store.copy_into(1, tensors)
            is_equal = equal(tensors, stores[0], 1)
        finally:
            os._exit(0 if is_equal else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    tensors = blank(stores[0])
    store.copy_into(2, tensors)
    assert equal(tensors, stores[0], 2)


def test_reads_of_one_call_are_in_flight_together(
    made: tuple[Path, list[CPUBackingStore]],
) -> None:
    path, stores = made
    together = threading.Barrier(4)

    def preadv(fd: int, buffers: Sequence[Any], offset: int) -> int:
        together.wait(timeout=10)  # passes only when four are inside
        return os.preadv(fd, buffers, offset)

    store = DiskBackingStore(PackFile(path, preadv=preadv), 0, 4)
    store.expect([5, 1, 3, 0])
    tensors = blank(stores[0])
    for expert in (5, 1, 3, 0):
        store.copy_into(expert, tensors)
        assert equal(tensors, stores[0], expert)


@pytest.mark.parametrize("policy", POLICIES.names())
def test_every_policy_may_choose_who_leaves(
    policy: str, made: tuple[Path, list[CPUBackingStore]]
) -> None:
    path, stores = made
    draws, pack = random.Random(1), PackFile(path)
    for num_rows in (1, 2, 5, 6):
        store = DiskBackingStore(pack, 1, num_rows, policy=policy)
        for _ in range(20):
            experts = draws.sample(range(NUM_EXPERTS), draws.randint(1, NUM_EXPERTS))
            store.expect(experts)
            for expert in experts:
                tensors = blank(stores[1])
                store.copy_into(expert, tensors)
                assert equal(tensors, stores[1], expert)
        store.residency.check()
        assert store.counts.ram_hits > 0 or num_rows == 1
    with pytest.raises(UnknownNameError):
        DiskBackingStore(pack, 0, 1, policy="none")


@pytest.mark.parametrize("seed", range(8))
def test_no_fault_and_no_order_of_calls_brings_wrong_bytes(
    seed: int, made: tuple[Path, list[CPUBackingStore]]
) -> None:
    """Calls that stop half-way, ask in another order or for others, on a disk that often fails."""
    path, stores = made
    draws = random.Random(seed)
    faults = [draws.choice([None, None, "eio", "short", "garbage"]) for _ in range(20_000)]
    pack = PackFile(path, preadv=failing(lambda n: faults[n]))
    store = DiskBackingStore(pack, 0, draws.randint(1, 4))
    num_right = num_failed = 0
    for _ in range(150):
        expected = draws.sample(range(NUM_EXPERTS), draws.randint(0, NUM_EXPERTS))
        if draws.random() < 0.8:
            store.expect(expected)
        asked = expected if draws.random() < 0.5 else draws.choices(range(NUM_EXPERTS), k=4)
        for expert in asked:
            tensors = blank(stores[0])
            try:
                store.copy_into(expert, tensors)
            except (StorageError, CheckpointError):
                num_failed += 1
                break
            assert equal(tensors, stores[0], expert)
            num_right += 1
        store.residency.check()
    assert num_right > 50
    assert num_failed > 5


def test_an_interrupt_among_the_reads_brings_no_wrong_bytes(
    made: tuple[Path, list[CPUBackingStore]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stores = made
    pack = PackFile(path)
    store, begin_read, count = DiskBackingStore(pack, 0, 3), pack.begin_read, iter(range(100))

    def interrupted(*args: Any) -> Any:
        started = begin_read(*args)
        if next(count) == 4:
            raise KeyboardInterrupt  # the read is under way, and nobody has noted it
        return started

    monkeypatch.setattr(pack, "begin_read", interrupted)
    store.expect([0, 1, 2])
    with pytest.raises(KeyboardInterrupt):
        store.expect([3, 4, 5])
    store.residency.check()
    for expert in (4, 1, 5, 0, 2, 3):
        tensors = blank(stores[0])
        store.copy_into(expert, tensors)
        assert equal(tensors, stores[0], expert)


def test_a_cache_over_disk_gives_what_one_over_memory_gives(
    made: tuple[Path, list[CPUBackingStore]], device: str
) -> None:
    path, stores = made
    pinned = device == "cuda"
    on_disk = CachedWeightProvider(
        DiskBackingStore(PackFile(path), 0, 2, pin=pinned), 3, policy="lru", device=device
    )
    in_memory = CachedWeightProvider(stores[0], 3, policy="lru", device=device)
    generator = torch.Generator().manual_seed(3)
    for call in range(30):
        ids = torch.randint(0, NUM_EXPERTS, (4, 2), generator=generator).to(device)
        waves = zip(on_disk.waves(ids), in_memory.waves(ids), strict=True)
        for found, expected in waves:
            assert torch.equal(found.topk_ids, expected.topk_ids)
            used = expected.topk_ids[expected.topk_ids >= 0].unique()
            for one, other in zip(found.tensors, expected.tensors, strict=True):
                assert torch.equal(one[used], other[used]), call
    stats, plain = on_disk.stats, in_memory.stats
    assert (stats.hits, stats.misses) == (plain.hits, plain.misses)
    assert stats.ram_hits is not None
    assert stats.disk_reads is not None
    assert stats.ram_hits + stats.disk_reads == stats.misses
    assert stats.disk_bytes == 8192 * stats.disk_reads
    assert "disk_reads" not in plain.as_dict()
    state = on_disk.state()
    on_disk.reset()
    assert (on_disk.stats.disk_reads, on_disk.stats.ram_hits) == (0, 0)
    on_disk.restore(state)
    assert on_disk.stats.disk_reads == 3, "a warm start reads its experts together"


def test_a_failed_read_leaves_the_slots_as_they_are(
    made: tuple[Path, list[CPUBackingStore]],
) -> None:
    path, stores = made
    faults = {2: "eio", 3: "eio"}
    pack = PackFile(path, preadv=failing(faults.get))
    provider = CachedWeightProvider(DiskBackingStore(pack, 0, 1), 3, policy="lru")
    with pytest.raises(StorageError, match=r"expert 2 of layers\.0"):
        provider.prepare(torch.tensor([[0, 1, 2]]))
    provider.slots.residency.check()
    assert set(provider.slots.residency.residents) == {0, 1}, "these arrived"
    result = provider.prepare(torch.tensor([[0, 1, 2]]))
    for expert, row in enumerate(result.topk_ids[0].tolist()):
        assert equal([tensor[row] for tensor in result.tensors], stores[0], expert)
