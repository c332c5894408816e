"""Rows that come ahead of their layer: the kernel against its twin, and plans that find them."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hotexperts.cache.packed_store import PackedBackingStore, lay_out_packed
from hotexperts.cache.store import RowForm
from hotexperts.formats import ExpertLayout
from hotexperts.kernels.gather.ahead import NOBODY, AheadCounter, AheadRows, Turn, Word
from hotexperts.kernels.gather.codes import INT4
from hotexperts.kernels.gather.layout import GatherLayout
from hotexperts.kernels.gather.scaled import Scaled
from hotexperts.kernels.plan import PlanLayout
from hotexperts.kernels.prefetch import naive
from hotexperts.kernels.prefetch.switch import Switch, fresh_switch
from hotexperts.predict.control import Control

pytest.importorskip("triton")
pytestmark = pytest.mark.interpret
DEVICE = "cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu"
NUM_EXPERTS, CAPACITY, NUM_ROWS, NUM_PROGRAMS, LAYER = 12, 5, 2, 3, 7
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
        self.rows = self.rows.pin_memory() if DEVICE == "cuda" and not packs else self.rows
        self.store = store  # whose memory the rows are
        options = {"num_programs": NUM_PROGRAMS, "ahead": self.ahead, "layer": LAYER} | HOW
        self.plan = PlanGather(self.layout, self.slots, self.rows, self.buffer, **options)
        self.prefetch = Prefetch(self.plan, self.ahead, self.rows_ahead, self.rows, **HOW)
        self.turn(LAYER - 1, Turn.ASKED)

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

    def turn(self, layer: int, turn: Turn) -> None:
        self.ahead.words[:, Word.TURN] = 4 * layer + turn

    def guess(self, *experts: int) -> None:
        """After the plan of the layer before; the likeliest first."""
        self.turn(LAYER - 1, Turn.ASKED)
        self.prefetch(scores_of(experts).to(DEVICE), LAYER - 1, len(experts))

    def done(self) -> list[int]:
        """Blocks that each program copied."""
        return self.ahead.words[:, Word.BLOCKS].tolist()

    def slot_of(self) -> torch.Tensor:
        return self.layout.view(self.plan.state, "slot_of").cpu()

    def counts(self) -> list[int]:
        return self.plan.ahead_counters.tolist()


def scores_of(experts: Sequence[int]) -> torch.Tensor:
    """Of two tokens, of which the second asks for nothing."""
    scores = torch.full((2, NUM_EXPERTS), -torch.inf)
    for place, expert in enumerate(experts):
        scores[0, expert] = -float(place)
    return scores


@pytest.mark.parametrize("packs", [False, True, TILES])
def test_kernel_and_twin_agree(packs: bool | Scaled) -> None:
    layer, draw = Layer(packs=packs), random.Random(5)
    twin = AheadRows.of(layer.rows_ahead, NUM_ROWS, NUM_PROGRAMS, torch.device("cpu"))
    layer.ahead.buffer.fill_(-1)
    twin.buffer.fill_(-1)
    issued = 0
    for step in range(8):
        layer.call(draw.sample(range(NUM_EXPERTS), 3))
        kind = [torch.float32, torch.bfloat16][step % 2]
        scores = torch.randn(1 + step % 3, NUM_EXPERTS).mul(2).round().to(kind)  # with equals
        scores[0, step] = [-torch.inf, torch.nan, torch.inf][step % 3]
        num_guesses = draw.choice([1, 4, NUM_EXPERTS])
        layer.turn(LAYER - 1, Turn.ASKED)
        num_valid = draw.choice([None, 0, 1, 2, 1 << 24])
        valid = None if num_valid is None else torch.tensor([num_valid], dtype=torch.int32)
        on_device = valid if valid is None else valid.to(DEVICE)
        layer.prefetch(scores.to(DEVICE), LAYER - 1, num_guesses, on_device)
        where = twin, layer.rows_ahead, layer.rows.cpu()
        how = layer.slot_of(), LAYER, num_guesses, num_valid
        issued += naive.prefetch(*where, scores, *how)
        assert torch.equal(layer.ahead.buffer.cpu(), twin.buffer)
        columns = [Word.TURN, *range(Word.EXPERTS, Word.EXPERTS + NUM_ROWS)]
        assert torch.equal(layer.ahead.words.cpu()[:, columns], twin.words[:, columns])
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
        layer.guess(*guesses)
        done = layer.done()
        assert sum(done) == 2 * num_blocks
        before = layer.counts()[AheadCounter.SAVED]
        stop_at(layer, [int(share * number) for number in done])
        layer.call([guesses[1], guesses[0], draw.choice(absent)])
        assert layer.counts()[AheadCounter.SAVED] - before == sum(layer.done())
        assert layer.counts()[AheadCounter.USED] == used + 2
        assert layer.ahead.words[:, Word.TURN].tolist() == [4 * LAYER + Turn.ASKED] * NUM_PROGRAMS


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
        layer.ahead.words[program, Word.BLOCKS] = limit


def test_what_is_there_is_not_copied_again() -> None:
    """Marked bytes of a row ahead reach the slot."""
    layer = Layer(packs=False)
    layer.guess(4)
    layer.ahead.buffer[5] = 1234
    layer.expected["wide"][4, 5] = 1234
    layer.call([4])
    assert layer.counts()[AheadCounter.SAVED] == sum(layer.done())


@pytest.mark.parametrize("turn", [(LAYER + 1, Turn.DONE), (LAYER, Turn.ASKED), (0, Turn.RUNNING)])
def test_rows_that_are_not_this_calls_are_not_taken(turn: tuple[int, Turn]) -> None:
    """Another layer's, those of a call before, those that another layer still waits for."""
    layer = Layer(packs=False)
    layer.guess(4, 5)
    layer.turn(*turn)
    layer.ahead.buffer.fill_(-7)
    layer.call([4, 5])
    assert layer.counts()[AheadCounter.USED :] == [0, 0]


def test_programs_take_what_their_own_twins_brought() -> None:
    """Two of three began before the layer asked."""
    layer = Layer(packs=True)
    layer.guess(4, 5)
    done = layer.done()
    layer.ahead.words[1] = torch.tensor([4 * (LAYER - 1) + Turn.ASKED, 99, 4, 5])
    layer.call([4, 5])
    assert layer.counts()[AheadCounter.SAVED] == done[0] + done[2]


@pytest.mark.parametrize("turn", [(LAYER, Turn.ASKED), (LAYER + 1, Turn.ASKED), (0, Turn.DONE)])
def test_who_comes_after_the_layer_asked_copies_nothing(turn: tuple[int, Turn]) -> None:
    layer = Layer(packs=True)
    layer.turn(*turn)
    before = layer.ahead.words.clone()
    layer.ahead.buffer.fill_(-7)
    layer.prefetch(scores_of([4, 5]).to(DEVICE), LAYER - 1, 2)
    assert (layer.ahead.buffer == -7).all()
    assert torch.equal(layer.ahead.words, before)
    layer.call([4, 5])
    assert layer.counts() == [0, 0, 0, 0]


def test_a_layer_that_is_off_copies_nothing() -> None:
    layer = Layer(packs=False)
    layer.plan.switch[Switch.IS_ON] = 0
    layer.guess(4, 5)
    assert layer.counts() == [0, 0, 0, 0]
    assert layer.ahead.words[:, Word.TURN].tolist() == [4 * (LAYER - 1) + Turn.ASKED] * NUM_PROGRAMS
    assert layer.ahead.words[0, Word.EXPERTS] == NOBODY


def test_plans_record_what_guesses_were_good_for() -> None:
    layer, twin = Layer(packs=False), Control(1, NUM_ROWS, ratio=None)
    for guesses, demand in [((4, 5), [4, 6]), ((), [6]), ((7,), [8])]:
        layer.guess(*guesses) if guesses else None
        layer.call(demand)
        twin.record(0, 0, len(guesses), len({*guesses} & {*demand}))
        assert layer.plan.switch[Switch.PAYOFF].item() == pytest.approx(twin.layers[0].payoff)


def test_the_switch_follows_its_specification() -> None:
    """Good times, all hits, waste; through off, rest and trials."""
    from kernels.judging import judge_kernel

    switch, twin = fresh_switch(torch.device(DEVICE)), Control(1, NUM_ROWS, ratio=None)
    state, draw, states = twin.layers[0], random.Random(9), []
    for chance in [0.9] * 40 + [0.0] * 900 + [0.5] * 900:
        issued = 2 if state.is_on and draw.random() < chance else 0
        used = draw.randrange(issued + 1)
        judge_kernel[(1,)](switch, issued, used)
        twin.record(0, 0, issued, used)
        found = switch.tolist()
        exact = [float(state.is_on), float(state.trial), float(state.rest), float(state.next_rest)]
        assert [found[place] for place in EXACT] == exact
        assert found[Switch.PAYOFF] == pytest.approx(state.payoff, abs=1e-5)
        states.append(state.is_on)
    changes = [after for before, after in itertools.pairwise(states) if before != after]
    assert changes == [False, True] * 2


EXACT = Switch.IS_ON, Switch.TRIAL, Switch.REST, Switch.NEXT_REST
