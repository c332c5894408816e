"""Page-locking that is refused: nothing half done, nothing left behind, and lower held."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_cudart import FakeRuntime
from hotexperts.cache import CPUBackingStore, held, host_memory, numa, page_lock
from hotexperts.cache.host_memory import HostBuffer, PageLockError
from hotexperts.cache.page_lock import Held, lock
from hotexperts.formats import ExpertLayout, TensorSpec

CPU = torch.device("cpu")
LAYOUT = ExpertLayout(
    (
        TensorSpec("w", (3, 4), torch.bfloat16),
        TensorSpec("none", (0, 4), torch.float32),  # some checkpoints have such
        TensorSpec("scale", (), torch.float32),
    )
)
ROWS_NBYTES = 4 * LAYOUT.row_nbytes


def use(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> FakeRuntime:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def make_stores(count: int) -> list[CPUBackingStore]:
    stores = [CPUBackingStore(LAYOUT, 4, pin=True, steps_back=True) for _ in range(count)]
    for i, store in enumerate(stores):
        store.tensors.w.copy_(torch.arange(48.0).view(4, 3, 4) + 100 * i)
        store.tensors.scale.copy_(torch.arange(4.0) + i)
    return stores


def test_a_refused_page_lock_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = use(monkeypatch, FakeRuntime(num_granted=0))
    wanted = r"page-locking 4 KiB .* \(CUDA error 2; RLIMIT_MEMLOCK is .*\): .*ulimit -l unlimited"
    with pytest.raises(PageLockError, match=wanted):
        HostBuffer(4096, pin=True)
    assert (runtime.locked, runtime.last_error) == ({}, 0)  # no kernel launch trips over it


def test_a_page_lock_ends_with_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = use(monkeypatch, FakeRuntime())
    buffer = HostBuffer(4096, pin=True)
    assert runtime.locked == {buffer.bytes.data_ptr(): 4096}
    assert (buffer.held, buffer.refusal) == (Held.PAGE_LOCKED, None)
    del buffer
    assert runtime.locked == {}


@pytest.mark.parametrize("second", [Held.LOCKED, Held.PAGEABLE])
def test_a_refusal_steps_back_where_that_will_do(
    second: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = use(monkeypatch, FakeRuntime(num_granted=1))
    monkeypatch.setattr(host_memory, "lock", lambda address, nbytes: second)
    first, other = (HostBuffer(4096, pin=True, steps_back=True) for _ in range(2))
    assert (first.held, other.held) == (Held.PAGE_LOCKED, second)
    assert str(other.refusal).startswith("CUDA error 2; RLIMIT_MEMLOCK is ")
    assert (list(runtime.locked), runtime.last_error) == ([first.bytes.data_ptr()], 0)
    del other
    assert len(runtime.locked) == 1  # what was never locked is not unlocked


def test_a_runtime_whose_file_was_replaced_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = "7f00-7f01 r-xp 0000 00:00 1  /x/libcudart.so.12 (deleted)\n7f02-7f03 rw-p 0 00:00 0\n"
    monkeypatch.setattr(Path, "read_text", lambda path: maps)
    assert page_lock._loaded_runtimes() == []


def test_memory_is_kept_from_being_swapped_out() -> None:
    pages = mmap.mmap(-1, 1 << 16)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    before = locked_kib()
    assert lock(address, 1 << 16) is Held.LOCKED
    assert locked_kib() - before == 64
    assert lock(mmap.PAGESIZE, 4096) is Held.PAGEABLE  # nothing is mapped there


def locked_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmLck"))


def test_without_a_gpu_nothing_is_said() -> None:
    assert held.settle([CPUBackingStore(LAYOUT, 4)], None, CPU) == ""


def test_page_locked_rows_need_no_bounce(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeRuntime())
    stores = make_stores(3)
    assert held.settle(stores, object(), CPU) == "page-locked"
    assert held.refusal(stores) is None
    assert [store.bounce for store in stores] == [None] * 3


@pytest.mark.parametrize(
    ("bounced_gb_s", "wins", "said"),
    [(9.0, True, "through page-locked rows at 9.0 GB/s"), (4.0, False, "directly at 5.0 GB/s")],
)
def test_the_faster_way_to_copy_is_taken(
    bounced_gb_s: float, wins: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, FakeRuntime(quota=2 * ROWS_NBYTES))
    monkeypatch.setattr(host_memory, "lock", lambda address, nbytes: Held.LOCKED)
    stores, bounce = make_stores(3), object()

    def measure(store: Any, device: torch.device) -> float:
        return 5.0 if store.bounce is None else bounced_gb_s

    monkeypatch.setattr(held, "measure", measure)
    text = held.settle(stores, bounce, CPU)
    assert text.startswith("4 KiB page-locked, 2 KiB locked; what is not")
    assert said in text
    assert "(CUDA error 2; RLIMIT_MEMLOCK is " in text
    assert held.refusal(stores) == stores[2].buffer.refusal
    assert [store.bounce for store in stores] == [None, None, bounce if wins else None]


def test_every_kind_of_memory_holds_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeRuntime(quota=ROWS_NBYTES))
    for i, store in enumerate(make_stores(2)):
        target = [torch.empty(s.shape, dtype=s.dtype) for s in LAYOUT.specs]
        store.copy_into(2, target)
        assert target[0].flatten().tolist() == [24.0 + k + 100 * i for k in range(12)]
        assert (target[1].shape, target[2].item()) == ((0, 4), 2.0 + i)
    assert held.measure(store, CPU) > 0


@pytest.mark.gpu
def test_a_bounce_carries_the_same_bytes_and_launches_go_on() -> None:
    real = torch.cuda.cudart()
    rows = [HostBuffer(8192, pin=True) for _ in range(2)]
    status = int(real.cudaHostRegister(rows[0].bytes.data_ptr(), 8192, 3))  # twice is refused
    assert status != 0
    host_memory.page_lock(real, rows[1].bytes.data_ptr(), 8192)  # refused too, and forgotten
    assert torch.ones(3, device="cuda").sum().item() == 3
    bounce = held.reserve_bounce(LAYOUT.row_nbytes)
    assert bounce is not None
    (store,) = make_stores(1)
    store.bounce = bounce
    _, slots = LAYOUT.allocate(4, torch.device("cuda"))
    for expert in range(4):
        store.copy_into(expert, [tensor[expert] for tensor in slots])
    assert torch.equal(slots.w.cpu(), store.tensors.w)
    assert torch.equal(slots.scale.cpu(), store.tensors.scale)


def fake_system(root: Path, nodes: int, node_text: str | None) -> Path:
    for i in range(nodes):
        (root / f"sys/devices/system/node/node{i}").mkdir(parents=True)
    device = root / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    if node_text is not None:
        (device / "numa_node").write_text(node_text)
    return root


@pytest.mark.parametrize(
    ("nodes", "text", "node"),
    [(2, "1\n", 1), (2, "-1\n", None), (2, None, None), (2, "?", None), (1, "0\n", None)],
)
def test_the_gpu_s_node_where_it_is_known(
    nodes: int, text: str | None, node: int | None, tmp_path: Path
) -> None:
    assert numa.node_of((0, 0x3B, 0), fake_system(tmp_path, nodes, text)) == node


def test_pages_are_asked_from_a_node() -> None:
    """Node 0 is everywhere; a node that no system has is refused."""
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("the kernel knows no nodes")
    buffer = HostBuffer(1 << 16, pin=False)
    before = policies(buffer.bytes.data_ptr())
    assert numa.prefer(0, buffer.bytes.data_ptr(), 1 << 16)
    assert (before, policies(buffer.bytes.data_ptr())) == ("default", "prefer:0")
    assert not numa.prefer(1023, buffer.bytes.data_ptr(), 1 << 16)


def policies(address: int) -> str:
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        where, policy = line.split()[:2]
        if int(where, 16) == address:
            return policy
    return "default"  # part of a mapping that begins before


def test_a_buffer_says_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeRuntime())
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(numa, "node_of_current_gpu", lambda: 1)
    monkeypatch.setattr(numa, "prefer", lambda node, address, n: not asked.append((node, n)))
    store = CPUBackingStore(LAYOUT, 4, pin=True)
    assert asked == [(1, ROWS_NBYTES)]
    assert held.settle([store], None, CPU) == "page-locked, on NUMA node 1"
