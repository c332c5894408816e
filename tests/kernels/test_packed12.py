"""bf16 in 12 bits: every value, random tensors, kernels against the specification, and stores."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotexperts.cache import CPUBackingStore, packed_store
from hotexperts.cache.packed_store import PackedBackingStore, describe_packing
from hotexperts.errors import ConfigError, UnsupportedModelError
from hotexperts.formats import ExpertLayout
from hotexperts.kernels.gather import packed12
from hotexperts.kernels.gather.packed12 import BLOCK_VALUES, ROOMS, Packed12

DEVICE = "cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu"
CPU = torch.device("cpu")


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16)


def raw(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)


def from_bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(torch.int16).view(torch.bfloat16)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 0.02).bfloat16()


def strange(num_experts: int, num_values: int) -> torch.Tensor:
    """Weights, among them zeros, subnormals, infinities and NaNs with payloads."""
    values = gaussian(num_experts, num_values)
    odd = [0, -(2**15), 1, -(2**15) + 1, 0x7F80, -128, 0x7FC5, -1, 0x7F, 0x0080]
    bits(values)[1, 7 : 7 + len(odd)] = torch.tensor(odd, dtype=torch.int16)
    bits(values)[0, -1] = 0x7FC1
    return values


@pytest.mark.parametrize("base", [-1, 0, 108, 240])
def test_every_value_comes_back(base: int) -> None:
    """All 65536, a few in a block, so that those outside of the window have room."""
    step = 32
    spread = torch.full((1, 65536 * step), (base + 1) << 7, dtype=torch.int32)
    spread[0, ::step] = torch.arange(65536) - 2**15
    values = from_bits(spread)
    packing = Packed12(base, 512)  # more room than any choice gives: 256 of a block stand out
    words = packed12.pack(values, packing)
    assert words.shape == (1, packing.num_words(values.shape[1]))
    assert torch.equal(bits(packed12.unpack(words, packing, values.shape[1])), bits(values))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 2 * BLOCK_VALUES + 9), st.integers(0, 2**30))
def test_random_weights_come_back(num_rows: int, num_values: int, seed: int) -> None:
    values = gaussian(num_rows, num_values, seed=seed)
    base = packed12.window(packed12.exponents(values))
    assert packed12.most_exceptions(values, base) <= ROOMS[0]
    packing = Packed12(base, ROOMS[0])
    found = packed12.unpack(packed12.pack(values, packing), packing, num_values)
    assert torch.equal(bits(found), bits(values))


def test_the_window_holds_what_occurs_most() -> None:
    """Exponents 100 to 114 occur twice, 115 once: base 99 leaves out the fewest."""
    numbers = torch.cat([torch.arange(100, 115).repeat(2), torch.tensor([115])])
    values = from_bits((numbers << 7).unsqueeze(0))
    counts = packed12.exponents(values)
    assert counts[100:116].tolist() == [2] * 15 + [1]
    assert packed12.window(counts) == 99
    assert packed12.most_exceptions(values, 99) == 1
    assert packed12.window(packed12.exponents(torch.zeros(1, 2).bfloat16())) == -1
    assert packed12.window(packed12.exponents(torch.full((1, 2), torch.inf).bfloat16())) == 240


def test_packed_weights_take_three_quarters_and_a_little() -> None:
    packing = Packed12(108, 16)
    assert packing.num_words(1024 * 2048) * 4 / (2 * 1024 * 2048) == pytest.approx(0.754, abs=5e-4)


def make_tensors(num_experts: int = 5) -> dict[str, torch.Tensor]:
    return {
        "gate_up": strange(num_experts, 24000).view(num_experts, 100, 240),
        "zeros": torch.zeros(num_experts, 16384, dtype=torch.bfloat16),
        "small": gaussian(num_experts, 64),
        "many": from_bits(torch.arange(num_experts * 8192)).view(num_experts, 8192),
        "bias": torch.arange(1.0, num_experts + 1),
        "half": gaussian(num_experts, 34).half(),
        "nothing": torch.zeros(num_experts, 0, dtype=torch.bfloat16),
        "turned": gaussian(num_experts, 128, 64).mT,
    }


def test_a_store_packs_what_pays_and_gives_every_row_back() -> None:
    tensors = make_tensors()
    plain = CPUBackingStore.from_tensors(tensors)
    for store in (
        PackedBackingStore.from_tensors(tensors, CPU),
        PackedBackingStore.from_store(plain, CPU),
    ):
        packed = [packing is not None for packing in store.form.packings]
        assert packed == [True, True, False, False, False, False, False, True]
        assert store.host_nbytes == 5 * store.form.row_nbytes
        share = store.host_nbytes / plain.host_nbytes
        assert describe_packing([store, plain]) == (
            f"packed12: {share:.2f} of the bytes, small plain in 1 of 1 layers, many plain in 1 of "
            "1 layers"
        )
        assert describe_packing([plain]) == ""
        for expert in range(5):
            found = [torch.full_like(tensor[0], 7) for tensor in tensors.values()]
            store.copy_into(expert, found)
            for got, wanted in zip(found, tensors.values(), strict=True):
                assert torch.equal(raw(got), raw(wanted[expert]))


def test_one_number_an_expert_stays_as_it_is() -> None:
    scale = gaussian(5)
    store = PackedBackingStore.from_tensors({"w": gaussian(5, 8192), "scale": scale}, CPU)
    assert [packing is not None for packing in store.form.packings] == [True, False]
    found = [torch.empty(8192, dtype=torch.bfloat16), torch.empty((), dtype=torch.bfloat16)]
    store.copy_into(3, found)
    assert found[1] == scale[3]


@pytest.mark.parametrize("shape", [(0, 8192), (3, 0)])
def test_nothing_to_store_is_refused(shape: tuple[int, int]) -> None:
    tensors = {"w": torch.zeros(shape, dtype=torch.bfloat16)}
    with pytest.raises(UnsupportedModelError, match=r"experts of .* are nothing to store"):
        PackedBackingStore.from_tensors(tensors, CPU)


@pytest.mark.parametrize("place", ["lay_out_packed", "choose_packings", "allocate"])
def test_a_gpu_without_room_to_pack_in_is_told_the_knob(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*args: object) -> None:
        raise torch.OutOfMemoryError

    plain = CPUBackingStore.from_tensors(make_tensors())
    monkeypatch.setattr(ExpertLayout if place == "allocate" else packed_store, place, no_room)
    with pytest.raises(ConfigError, match=r"packing takes .*: use expert_packing 'none'"):
        PackedBackingStore.from_store(plain, CPU)


def test_progress_is_told_for_every_expert() -> None:
    seen: list[int] = []
    store = CPUBackingStore.from_tensors({"w": gaussian(5, 64)})
    PackedBackingStore.from_store(store, CPU, after_each=seen.append)
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.interpret
@pytest.mark.parametrize("capacity", [5, 2])
def test_kernels_unpack_what_torch_packs(capacity: int) -> None:
    """Slots and banks: each pair reads its expert's row, bit for bit."""
    pytest.importorskip("triton")
    from hotexperts.cache.device import DeviceWeightProvider

    tensors = make_tensors()
    store = PackedBackingStore.from_tensors(tensors, CPU, pin=DEVICE == "cuda")
    provider = DeviceWeightProvider(store, capacity, device=DEVICE)
    provider.buffer.fill_(-1)
    for ids, prefill in (([0, 1], False), ([2, 3, 4, 0], False), ([4, 3, 2, 1, 0], True)):
        topk_ids = torch.tensor([ids], device=DEVICE)
        served = []
        for wave in provider.waves(topk_ids, prefill=prefill):
            for expert, row in zip(ids, wave.topk_ids.flatten().tolist(), strict=True):
                if row < 0:
                    continue
                served.append(expert)
                for name, tensor in tensors.items():
                    found = getattr(wave.tensors, name)[row].cpu()
                    assert torch.equal(raw(found), raw(tensor[expert])), name
        assert sorted(served) == sorted(ids)
    copies = provider.stats.bytes_moved / store.form.nbytes
    assert copies == int(copies)
    assert store.form.nbytes < sum(tensor[0].nbytes for tensor in tensors.values())


@pytest.mark.interpret
@pytest.mark.parametrize("base", [-1, 0, 108, 240])
def test_kernels_keep_an_exceptions_neighbour(base: int) -> None:
    """A word holds two values, and nothing of one's code may reach the other."""
    pytest.importorskip("triton")
    from hotexperts.cache.device import DeviceWeightProvider

    generator = torch.Generator().manual_seed(base)
    ends = torch.tensor([(base + 1) << 7, (base + 15) << 7], dtype=torch.int32)  # of the window
    numbers = ends.repeat(2, BLOCK_VALUES)
    for first in (0, BLOCK_VALUES):  # no more in a block than there is room for
        places = first + torch.randperm(BLOCK_VALUES, generator=generator)[: ROOMS[-1]]
        numbers[:, places] = torch.randint(0, 2**16, (2, ROOMS[-1]), generator=generator).int()
    tensor = from_bits(numbers)
    store = PackedBackingStore.from_tensors({"w": tensor}, CPU, pin=DEVICE == "cuda")
    assert [packing and packing.base for packing in store.form.packings] == [base]
    found = DeviceWeightProvider(store, 2, device=DEVICE).prepare(
        torch.tensor([[0, 1]], device=DEVICE)
    )
    rows = found.topk_ids.flatten().long()
    assert torch.equal(bits(found.tensors.w[rows].cpu()), bits(tensor))


@pytest.mark.interpret
def test_a_packed_cache_survives_a_restart() -> None:
    pytest.importorskip("triton")
    from hotexperts.cache.device import DeviceWeightProvider

    store = PackedBackingStore.from_tensors(make_tensors(), CPU, pin=DEVICE == "cuda")
    first, second = (DeviceWeightProvider(store, 2, device=DEVICE) for _ in range(2))
    first.prepare(torch.tensor([[3, 1]], device=DEVICE))
    second.restore(first.state())
    assert second.slot_of == first.slot_of
    for one, other in zip(first.slot_tensors, second.slot_tensors, strict=True):
        assert torch.equal(raw(one), raw(other))


@pytest.mark.gpu
@pytest.mark.parametrize("num_programs", [16, 40])
def test_many_events_on_the_gpu(num_programs: int) -> None:
    """Many warps and programs: every resident's slot has its expert's bits after every event."""
    from hotexperts.cache.device import DeviceWeightProvider

    num_experts = 48
    tensors = {"up": strange(num_experts, 120_004), "down": strange(num_experts, 65_536)}
    on_device = {name: tensor.to("cuda") for name, tensor in tensors.items()}
    store = PackedBackingStore.from_tensors(on_device, torch.device("cuda"), pin=True)
    assert all(packing is not None for packing in store.form.packings)
    provider = DeviceWeightProvider(store, 20, device="cuda", num_programs=num_programs)
    provider.buffer.fill_(-1)
    generator = torch.Generator().manual_seed(num_programs)
    for event in range(300):
        ids = torch.randint(0, num_experts, (2, 8), generator=generator).to("cuda")
        for wave in provider.waves(ids.repeat(1 + 10 * (event % 3), 1), prefill=event % 3 == 2):
            rows = wave.topk_ids.flatten().long()
            experts = ids.repeat(1 + 10 * (event % 3), 1).flatten()[rows >= 0]
            for name, tensor in on_device.items():
                found = getattr(wave.tensors, name)[rows[rows >= 0]]
                assert torch.equal(bits(found), bits(tensor[experts])), (event, name)
