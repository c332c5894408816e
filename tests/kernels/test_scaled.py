"""Codes and scales: against float64, kernels against the specification, and stores."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from hotexperts.cache import CachedWeightProvider, CPUBackingStore
from hotexperts.cache.packed_store import PackedBackingStore, describe_packing
from hotexperts.cache.prefetch import NUM_PROGRAMS, NUM_UNPACKING, num_programs_for
from hotexperts.cache.quantised import QuantisedStore, quantised_packings
from hotexperts.cache.store import RowForm
from hotexperts.errors import CheckpointError, ConfigError
from hotexperts.formats import ExpertLayout, TensorSpec
from hotexperts.kernels.gather import scaled
from hotexperts.kernels.gather.codes import CODE_NAMES, E2M1, E4M3, INT4, INT8, exponents
from hotexperts.kernels.gather.scaled import Scaled

DEVICE = "cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu"
CPU = torch.device("cpu")
# Rows, columns, rows and columns that share a scale.
SHAPES = [(24, 128, 1, 128), (32, 96, 1, 32), (48, 32, 16, 16), (128, 256, 128, 128)]
TURNED = (64, 96, 32, 1)
E2M1_NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def as_float64(codes: torch.Tensor, code: int) -> torch.Tensor:
    """What codes stand for, one after another, from the formats' definitions."""
    found = []
    for number in codes.flatten().tolist():
        if code == INT8:
            found.append(number - 256 if number > 127 else number)
        elif code == INT4:
            found.append(number - 16 if number > 7 else number)
        elif code == E2M1:
            found.append(E2M1_NUMBERS[number & 7] * (-1 if number & 8 else 1))
        else:
            exponent, mantissa = number >> 3 & 15, number & 7
            size = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else mantissa / 512
            found.append(-size if number & 128 else size)
    return torch.tensor(found, dtype=torch.float64).view(codes.shape)


def random_coded(packing: Scaled, num_experts: int, seed: int = 0) -> tuple[Any, ...]:
    """Codes, no NaN among them, scales that the packing holds, and zero points where it has any."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_experts, packing.rows, packing.columns)
    codes = torch.randint(0, 1 << packing.code_bits, shape, generator=generator).to(torch.uint8)
    if packing.code == E4M3:
        codes[(codes & 0x7F) == 0x7F] = 0
    grid = packing.rows // packing.group_rows, packing.columns // packing.group_columns
    biased = torch.randint(110, 124, (num_experts, *grid), generator=generator)
    scales = 2.0 ** (biased - 127.0)
    if packing.scale_bits > 8:
        scales = scales * (1 + torch.rand(scales.shape, generator=generator))
    if packing.scale_bits == 16:
        scales = (scales.half() if packing.has_half_scales else scales.bfloat16()).float()
    if not packing.has_zeros:
        return codes, scales
    half = 1 << (packing.code_bits - 1)
    return codes, scales, torch.randint(-half, half + 1, scales.shape, generator=generator).short()


def cases() -> list[Scaled]:
    found = []
    for i, code in enumerate((INT8, E4M3, INT4, E2M1)):
        for j, shape in enumerate([*SHAPES, TURNED]):
            dtype = (torch.bfloat16, torch.float16)[(i + j) % 2]
            found.append(Scaled(code, *shape, (32, 16, 8)[(i + j) % 3], dtype))
    of_16_bits = [
        Scaled(INT8, *SHAPES[0], 16, torch.float16, True),
        Scaled(INT4, *SHAPES[1], 16, torch.bfloat16, True, True),
        Scaled(INT8, *SHAPES[2], 16, torch.bfloat16, False, True),
        Scaled(INT4, *TURNED, 16, torch.bfloat16, True),
    ]
    return [*of_16_bits, *found]


def case_id(packing: Scaled) -> str:
    name = CODE_NAMES[packing.code]
    scale = f"{packing.scale_bits}{'h' * packing.has_half_scales}{'z' * packing.has_zeros}"
    return f"{name}-{packing.group_rows}x{packing.group_columns}-{scale}"


@pytest.mark.parametrize("packing", cases(), ids=case_id)
def test_values_are_code_times_scale(packing: Scaled) -> None:
    """Rounded once to float32 and once to the slot's dtype."""
    codes, scales, *zeros = random_coded(packing, 2)
    words = packing.encode(codes, scales, *zeros)
    num_values = packing.rows * packing.columns
    assert words.shape == (2, packing.num_words(num_values))
    found = packing.unpack(words, num_values).view(codes.shape)
    spread = [part.double() for part in (scales, *zeros)]
    for dim, size in ((1, packing.group_rows), (2, packing.group_columns)):
        spread = [part.repeat_interleave(size, dim) for part in spread]
    wanted = (as_float64(codes, packing.code) - sum(spread[1:])) * spread[0]
    assert torch.equal(found, wanted.float().to(packing.dtype))
    assert found.dtype == packing.dtype


def test_every_exponent_is_kept_and_the_sign_of_zero() -> None:
    stored = torch.arange(255).to(torch.uint8)
    assert torch.equal(exponents(stored).double(), 2.0 ** (stored.double() - 127))
    packing = Scaled(E2M1, 64, 64, 32, 1, 8, torch.bfloat16)
    codes = torch.full((1, 64, 64), 8, dtype=torch.uint8)
    found = packing.unpack(packing.encode(codes, torch.ones(1, 2, 64)), 64 * 64)
    assert torch.equal(found.signbit(), torch.ones(1, 64 * 64, dtype=torch.bool))


@pytest.mark.parametrize(("code", "largest"), [(INT8, 127), (INT4, 7), (E4M3, 448)])
def test_quantising_takes_the_nearest_code(code: int, largest: int) -> None:
    """And a group's largest value gets the largest one."""
    packing = Scaled(code, 32, 128, 1, 32, 16, torch.bfloat16)
    values = torch.randn(2, 32 * 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    values[0, :32] = 0
    codes, scales = packing.quantise(values)
    assert torch.equal(scales, scales.bfloat16().float())
    assert not codes[0, 0, :32].any()
    assert int(codes.max()) < 1 << packing.code_bits
    numbers = as_float64(codes, code).view(2, 32, 4, 32)
    assert int(numbers.abs().max()) == largest
    steps = values.view(2, 32, 4, 32).double() / scales.double().clamp(min=1e-30).unsqueeze(-1)
    every = as_float64(torch.arange(1 << packing.code_bits).to(torch.uint8), code)
    every = every[every.abs() <= largest]
    nearest = (every - steps.unsqueeze(-1)).abs().amin(-1)
    assert torch.allclose((numbers - steps).abs(), nearest, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "is_possible"),
    [((768, 2048), True), ((2048, 768), True), ((64, 7), False), ((9,), False), ((), False)],
)
def test_what_no_group_divides_stays_as_it_is(shape: tuple[int, ...], is_possible: bool) -> None:
    found = scaled.by_row(INT4, shape, 32, 16, torch.bfloat16)
    assert (found is not None) == is_possible


def test_bits_of_a_value() -> None:
    """As documented: 8.125 for fp8 and int8, 4.5 for int4, 4.25 for mxfp4, 8.03 for fp8 blocks."""
    for dtype, bits in (("int8", 8.125), ("fp8", 8.125), ("int4", 4.5)):
        layout = ExpertLayout((TensorSpec("w", (768, 2048), torch.bfloat16),))
        form = RowForm.packed(layout, quantised_packings(layout, dtype))  # type: ignore[arg-type]
        assert form.nbytes * 8 == bits * 768 * 2048
    for packing, bits in (
        (Scaled(E2M1, 2880, 5760, 32, 1, 8, torch.bfloat16), 4.25),
        (Scaled(E2M1, 2880, 2880, 32, 1, 8, torch.bfloat16), 4.25),
        (Scaled(E4M3, 1536, 2048, 128, 128, 32, torch.bfloat16), 8 * (1 + 4 / 1024)),
    ):
        num_values = packing.rows * packing.columns
        assert packing.num_words(num_values) * 32 == bits * num_values


def make_tensors(num_experts: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(num_experts, *shape, generator=generator) * 0.02).bfloat16()

    return {
        "gate_up": random(96, 64),
        "bias": random(96),
        "down": random(64, 48).half(),
        "odd": random(6, 9),
    }


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
def test_the_error_of_a_store_is_the_true_one(dtype: Any) -> None:
    tensors = make_tensors()
    plain = CPUBackingStore.from_tensors(tensors)
    stores = [
        QuantisedStore.quantise(tensors, CPU, dtype),
        QuantisedStore.quantise(plain, CPU, dtype),
    ]
    assert torch.equal(stores[0].rows, stores[1].rows)
    lost = whole = 0.0
    for expert in range(5):
        found = [torch.full_like(tensor[0], 7) for tensor in tensors.values()]
        stores[0].copy_into(expert, found)
        for (name, tensor), got in zip(tensors.items(), found, strict=True):
            if name in ("bias", "odd"):
                assert torch.equal(got, tensor[expert])
            else:
                lost += float((got.double() - tensor[expert].double()).square().sum())
                whole += float(tensor[expert].double().square().sum())
    wanted = (lost / whole) ** 0.5
    for store in stores:
        assert store.relative_error == pytest.approx(wanted, rel=1e-6)
    low, high = {"fp8": (0.02, 0.03), "int8": (0.004, 0.01), "int4": (0.07, 0.12)}[dtype]
    assert low < wanted < high
    share = stores[0].host_nbytes / plain.host_nbytes
    assert describe_packing([stores[0], plain]) == (
        f"{dtype}: {share:.2f} of the bytes, lossy: relative error {wanted:.2g} to {wanted:.2g} a "
        "layer, odd plain in 1 of 1 layers"
    )
    packed = PackedBackingStore.from_tensors({"w": torch.ones(3, 64, 64).bfloat16()}, CPU)
    about = [describe_packing([store]) for store in (stores[0], packed)]
    assert describe_packing([stores[0], packed]) == "; ".join(about)


def test_whatever_is_unpacked_takes_more_programs() -> None:
    tensors = make_tensors()
    quantised = QuantisedStore.quantise(tensors, CPU, "int8")
    plain = CPUBackingStore.from_tensors(tensors)
    assert num_programs_for([plain, plain]) == NUM_PROGRAMS
    assert num_programs_for([plain, quantised]) == NUM_UNPACKING


def test_what_cannot_be_quantised_is_refused() -> None:
    tensors = make_tensors()
    with pytest.raises(ConfigError, match="for slots of 16 bits, and 'down' is float32: use dtype"):
        QuantisedStore.quantise({**tensors, "down": tensors["down"].float()}, CPU, "int8")
    with pytest.raises(ConfigError, match=r"makes no tensor of shapes \[\[6, 9\]\] smaller"):
        QuantisedStore.quantise({"odd": tensors["odd"]}, CPU, "int8")
    tensors["gate_up"][2, 5, 5] = torch.inf
    with pytest.raises(CheckpointError, match="infinite or no numbers"):
        QuantisedStore.quantise(tensors, CPU, "int4")


class Codes:
    """A source whose experts are of one matrix in codes, and a bias."""

    kind = "codes"

    def __init__(self, packing: Scaled, num_experts: int) -> None:
        shape = packing.rows, packing.columns
        self.layout = ExpertLayout(
            (TensorSpec("w", shape, packing.dtype), TensorSpec("bias", (8,), packing.dtype))
        )
        self.num_experts = num_experts
        self.packings = (packing, None)
        self.coded = random_coded(packing, num_experts)
        self.bias = torch.arange(8.0 * num_experts).view(num_experts, 8).to(packing.dtype)

    def read(self, expert: int) -> Any:
        one = slice(expert, expert + 1)
        return [tuple(part[one] for part in self.coded), self.bias[one]]


def check_waves(provider: Any, wanted: Any) -> None:
    """Slots and banks: each pair reads its expert's row, bit for bit."""
    for ids, prefill in (([0, 1], False), ([2, 3, 4, 0], False), ([4, 3, 2, 1, 0], True)):
        topk_ids = torch.tensor([ids], device=DEVICE)
        served = []
        for wave in provider.waves(topk_ids, prefill=prefill):
            for expert, row in zip(ids, wave.topk_ids.flatten().tolist(), strict=True):
                if row < 0:
                    continue
                served.append(expert)
                for tensor, all_of_it in zip(wave.tensors, wanted, strict=True):
                    found = tensor[row].cpu().contiguous().view(torch.int16)
                    assert torch.equal(found, all_of_it[expert].contiguous().view(torch.int16))
        assert sorted(served) == sorted(ids)


@pytest.mark.interpret
@pytest.mark.parametrize("packing", cases(), ids=case_id)
def test_kernels_make_what_torch_makes(packing: Scaled) -> None:
    pytest.importorskip("triton")
    from hotexperts.cache.device import DeviceWeightProvider

    source = Codes(packing, 5)
    store = QuantisedStore.of_codes(source, CPU, pin=DEVICE == "cuda")
    assert store.relative_error is None
    words = packing.encode(*source.coded)
    values = packing.unpack(words, packing.rows * packing.columns)
    wanted = values.view(5, packing.rows, packing.columns), source.bias
    device = DeviceWeightProvider(store, 2, device=DEVICE)
    device.buffer.fill_(-1)
    host = CachedWeightProvider(store, 2, device=DEVICE)
    for provider in (device, host):
        check_waves(provider, wanted)
        assert provider.stats.bytes_moved % store.form.nbytes == 0
        assert store.form.nbytes < store.layout.nbytes


@pytest.mark.interpret
def test_a_scale_is_read_as_it_is_at_both_ends() -> None:
    """The smallest and largest exponents, and codes that are subnormal."""
    pytest.importorskip("triton")
    from hotexperts.cache.device import DeviceWeightProvider

    for code, bits in ((E2M1, 8), (E4M3, 32), (E4M3, 8)):
        packing = Scaled(code, 64, 64, 32, 1, bits, torch.bfloat16)
        source = Codes(packing, 2)
        codes, scales = source.coded
        codes[:, :, :16] = torch.arange(16)
        scales[:, :, ::3] = 2.0**-127
        scales[:, :, 1::3] = 2.0**118
        store = QuantisedStore.of_codes(source, CPU, pin=DEVICE == "cuda")
        wanted = packing.unpack(packing.encode(codes, scales), 64 * 64).view(2, 64, 64)
        provider = DeviceWeightProvider(store, 2, device=DEVICE)
        found = provider.prepare(torch.tensor([[0, 1]], device=DEVICE))
        rows = found.topk_ids.flatten().long()
        assert torch.equal(
            found.tensors.w[rows].cpu().view(torch.int16), wanted.view(torch.int16)
        ), packing


def test_the_twin_in_torch_is_the_stores_own() -> None:
    """`naive.gather` writes into slots what `copy_into` does."""
    from hotexperts.kernels.gather import naive
    from hotexperts.kernels.gather.layout import GatherLayout

    source = Codes(replace(cases()[-1], scale_bits=8), 3)
    store = QuantisedStore.of_codes(source, CPU)
    sizes = tuple(spec.nbytes for spec in store.layout.specs)
    form = store.form
    layout = GatherLayout.of(form.offsets, sizes, form.row_nbytes, 2, form.packings)
    buffer = layout.buffer(CPU)
    naive.gather(layout, store.rows.view(torch.int32), buffer, torch.tensor([2]), torch.tensor([1]))
    found = torch.empty(source.layout.specs[0].shape, dtype=source.layout.specs[0].dtype)
    bias = torch.empty(8, dtype=found.dtype)
    store.copy_into(2, [found, bias])
    for begin, words, tensor in zip(
        layout.slot_offsets, layout.num_words, (found, bias), strict=True
    ):
        in_slot = buffer[begin + words : begin + 2 * words]
        assert torch.equal(in_slot.view(torch.int16), tensor.flatten().view(torch.int16))
    assert isinstance(store, PackedBackingStore)
