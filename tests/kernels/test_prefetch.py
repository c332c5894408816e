"""Rows that come ahead of their layer: the kernel against its twin, and plans that find them."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from hotexperts.cache.packed_store import PackedBackingStore, lay_out_packed
from hotexperts.cache.store import RowForm
from hotexperts.formats import ExpertLayout
from hotexperts.kernels.gather.ahead import KEYS, AheadCounter, AheadRows
from hotexperts.kernels.gather.codes import INT4
from hotexperts.kernels.gather.layout import GatherLayout
from hotexperts.kernels.gather.scaled import Scaled
from hotexperts.kernels.plan import PlanLayout
from hotexperts.kernels.prefetch import naive

pytest.importorskip("triton")
pytestmark = pytest.mark.interpret
DEVICE = "cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu"
NUM_EXPERTS, CAPACITY, NUM_ROWS, NUM_PROGRAMS, KEY = 12, 5, 2, 3, 4096
TILES = Scaled(INT4, 32, 192, 32, 1, 16, torch.bfloat16)  # tiles of 64 columns
HOW: dict[str, Any] = {"num_warps": 4, "block_words": 64}


class Layer:
    """One layer's rows, plan and prefetch; the first of two tensors packed, as packed12 or tiles.

    Tiles are three in a row of the matrix, so that none of them lies in one stretch of a slot.
    """

    def __init__(self, *, packs: bool | Scaled) -> None:
        from hotexperts.kernels.plan.launch import PlanGather
        from hotexperts.kernels.prefetch.launch import Prefetch

        generator = torch.Generator().manual_seed(3)
        self.packs, num_wide = packs, 25_000
        if isinstance(packs, Scaled):
            num_wide = packs.rows * packs.columns
        wide = torch.randn(NUM_EXPERTS, num_wide, generator=generator).bfloat16()
        narrow = torch.randn(NUM_EXPERTS, 40, generator=generator).bfloat16()
        tensors = {"wide": wide, "narrow": narrow}
        store = PackedBackingStore.from_tensors(tensors, torch.device("cpu"), pin=DEVICE == "cuda")
        form, sizes = store.form, (2 * num_wide, 2 * 40)
        if isinstance(packs, Scaled):
            layout = ExpertLayout.of(tensors)[0]
            store = PackedBackingStore(
                layout,
                NUM_EXPERTS,
                RowForm.packed(layout, (packs, None)),
                pin=DEVICE == "cuda",
            )
            form = store.form
            store.rows.copy_(lay_out_packed(form, list(tensors.values())))
            wide = packs.unpack(packs.pack(wide), num_wide)
        if packs:
            self.rows = store.rows.view(torch.int32)
            place = form.offsets, sizes, form.row_nbytes
            packings: Any = form.packings
        else:
            plain = torch.zeros(NUM_EXPERTS, 50_176 + 256, dtype=torch.uint8)
            plain[:, :50_000] = wide.view(torch.uint8)
            plain[:, 50_176 : 50_176 + 80] = narrow.view(torch.uint8)
            self.rows = plain.view(torch.int32)
            place, packings = ((0, 50_176), sizes, 50_432), ()
        self.expected = {"wide": wide.view(torch.int32), "narrow": narrow.view(torch.int32)}
        self.layout = PlanLayout(NUM_EXPERTS, CAPACITY, "lru")
        self.slots = GatherLayout.of(*place, CAPACITY, packings)
        self.rows_ahead = GatherLayout.of(*place, NUM_ROWS, packings)
        self.ahead = AheadRows.of(self.rows_ahead, NUM_ROWS, NUM_PROGRAMS, torch.device(DEVICE))
        self.buffer = self.slots.buffer(torch.device(DEVICE))
        self.rows = self.rows.pin_memory() if DEVICE == "cuda" else self.rows
        options = {"num_programs": NUM_PROGRAMS, "ahead": self.ahead, "first_key": KEY} | HOW
        self.plan = PlanGather(self.layout, self.slots, self.rows, self.buffer, **options)
        self.prefetch = Prefetch(self.plan, self.ahead, self.rows_ahead, self.rows, KEY, **HOW)

    def call(self, experts: list[int]) -> None:
        """One event, after which every resident's slot must have its expert's bits."""
        ids = torch.tensor([experts], device=DEVICE)
        self.plan(ids, torch.empty_like(ids))
        for expert, slot in enumerate(self.slot_of().tolist()):
            for name, begin, size in zip(
                ("wide", "narrow"), self.slots.slot_offsets, self.slots.num_words, strict=True
            ):
                if slot >= 0:
                    found = self.buffer[begin + slot * size :][:size].cpu()
                    assert torch.equal(found, self.expected[name][expert]), (expert, name)

    def slot_of(self) -> torch.Tensor:
        return self.layout.view(self.plan.state, "slot_of").cpu()

    def counts(self) -> list[int]:
        return self.plan.ahead_counters.tolist()


@pytest.mark.parametrize("packs", [False, True, TILES])
def test_kernel_and_twin_agree(packs: bool | Scaled) -> None:
    layer, draw = Layer(packs=packs), random.Random(5)
    twin = AheadRows.of(layer.rows_ahead, NUM_ROWS, NUM_PROGRAMS, torch.device("cpu"))
    layer.ahead.buffer.fill_(-1)
    twin.buffer.fill_(-1)
    issued = 0
    for _ in range(6):
        layer.call(draw.sample(range(NUM_EXPERTS), 3))
        guesses = [*draw.sample(range(-1, NUM_EXPERTS), 3), draw.choice([-1, 99])]
        on_device = torch.tensor(guesses, dtype=torch.int32, device=DEVICE)
        layer.prefetch(on_device)
        issued += naive.prefetch(
            twin, layer.rows_ahead, layer.rows.cpu(), on_device.cpu(), layer.slot_of(), KEY
        )
        assert torch.equal(layer.ahead.buffer.cpu(), twin.buffer)
        keys = slice(KEYS, KEYS + NUM_ROWS)
        assert torch.equal(layer.ahead.words[keys].cpu(), twin.words[keys])
        assert layer.counts()[AheadCounter.ISSUED] == issued


@pytest.mark.parametrize("packs", [False, True, TILES])
def test_a_plan_takes_what_is_there_and_copies_the_rest(packs: bool | Scaled) -> None:
    """Each program stopped somewhere; what it did not copy is poison."""
    layer, draw = Layer(packs=packs), random.Random(7)
    num_blocks = sum(
        -(-size // block)
        for size, block in zip(
            layer.slots.num_words, layer.slots.constants(64)["BLOCKS"], strict=True
        )
    )
    for share in (0.0, 0.4, 1.0):
        used = layer.counts()[AheadCounter.USED]
        absent = [e for e, slot in enumerate(layer.slot_of().tolist()) if slot < 0]
        guesses = draw.sample(absent, 2)
        layer.prefetch(torch.tensor([*guesses, -1, -1], dtype=torch.int32, device=DEVICE))
        done = layer.ahead.words[KEYS + NUM_ROWS :]
        assert int(done.sum()) == 2 * num_blocks
        before = layer.counts()[AheadCounter.SAVED]
        stop_at(layer, [int(share * number) for number in done.tolist()])
        layer.call([guesses[1], guesses[0], draw.choice(absent)])
        saved = layer.counts()[AheadCounter.SAVED] - before
        assert saved == int(done.sum())
        assert layer.counts()[AheadCounter.USED] == used + 2
        assert layer.ahead.words[: KEYS + NUM_ROWS].tolist() == [0, -1, -1]


def words_of_block(layer: Layer, size: int, block: int, i_block: int) -> torch.Tensor:
    """Where one block of a tensor of so many words lies in a slot."""
    words = torch.arange(size)
    tiles = layer.packs
    if not isinstance(tiles, Scaled) or size != tiles.rows * tiles.columns // 2:
        return words[i_block * block : (i_block + 1) * block]
    rows, columns = tiles.tile
    down, across = divmod(i_block, tiles.columns // columns)
    matrix = words.view(tiles.rows, tiles.columns // 2)
    tile = matrix[down * rows : (down + 1) * rows]
    return tile[:, across * columns // 2 : (across + 1) * columns // 2].flatten()


def stop_at(layer: Layer, num_done: list[int]) -> None:
    """As if each program had been stopped after so many blocks."""
    blocks = layer.slots.constants(64)["BLOCKS"]
    buffer, at = layer.ahead.buffer, layer.ahead.offsets
    for program, limit in enumerate(num_done):
        position = 0
        for row in range(NUM_ROWS):
            for begin, size, block in zip(at, layer.slots.num_words, blocks, strict=True):
                for i_block in range(program, -(-size // block), NUM_PROGRAMS):
                    if position >= limit:
                        of_row = buffer[begin + row * size :][:size]
                        of_row[words_of_block(layer, size, block, i_block)] = -7
                    position += 1
        layer.ahead.words[KEYS + NUM_ROWS + program] = limit


def test_what_is_there_is_not_copied_again() -> None:
    """Marked bytes of a row ahead reach the slot."""
    layer = Layer(packs=False)
    layer.prefetch(torch.tensor([4, -1, -1, -1], dtype=torch.int32, device=DEVICE))
    layer.ahead.buffer[5] = 1234
    layer.expected["wide"][4, 5] = 1234
    layer.call([4])
    assert layer.counts()[AheadCounter.SAVED] == int(layer.ahead.words[KEYS + NUM_ROWS :].sum())


def test_rows_of_another_layer_are_not_taken() -> None:
    layer = Layer(packs=False)
    layer.prefetch(torch.tensor([4, 5, -1, -1], dtype=torch.int32, device=DEVICE))
    layer.ahead.words[KEYS : KEYS + NUM_ROWS] += 4096
    layer.ahead.buffer.fill_(-7)
    layer.call([4, 5])
    assert layer.counts()[AheadCounter.USED :] == [0, 0]


def test_who_is_told_to_stop_before_the_start_copies_nothing() -> None:
    layer = Layer(packs=True)
    layer.ahead.words[0] = 1
    layer.ahead.buffer.fill_(-7)
    layer.prefetch(torch.tensor([4, 5, -1, -1], dtype=torch.int32, device=DEVICE))
    assert (layer.ahead.buffer == -7).all()
    layer.call([4, 5])
    assert layer.ahead.words[0] == 0, "the next prefetch may run"
    assert layer.counts() == [2, 0, 2, 0]
