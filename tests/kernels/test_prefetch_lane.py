"""Layers that prefetch for each other: the same bytes in every slot, whatever was guessed."""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import pytest
import torch

from hotexperts.cache import CPUBackingStore, ExpertWeightResult
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.cache.lift import LiftTable
from hotexperts.cache.lookahead import Lookahead
from hotexperts.cache.padding import TokenCount
from hotexperts.cache.prefetch import PrefetchLane
from hotexperts.integrations.vllm.ranks import fingerprint
from hotexperts.kernels.gather.ahead import NOBODY, AheadCounter, Word
from hotexperts.kernels.plan import Counter
from hotexperts.kernels.prefetch.switch import Switch
from hotexperts.predict.cross_lift import CrossLift
from hotexperts.stats import total

pytest.importorskip("triton")
pytestmark = pytest.mark.interpret
DEVICE = "cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu"
NUM_EXPERTS, CAPACITY, NUM_LAYERS = 16, 6, 3
NUM_PROGRAMS = 2 if DEVICE == "cpu" else 16


def make_layers(num_values: int = 24) -> list[DeviceWeightProvider]:
    """Layer l's expert e holds 100 l + e everywhere."""
    layers: list[DeviceWeightProvider] = []
    lane = None
    for number in range(NUM_LAYERS):
        values = torch.arange(NUM_EXPERTS).float() + 100 * number
        tensors = {"w": values.view(-1, 1).expand(-1, num_values).contiguous(), "bias": values}
        store = CPUBackingStore.from_tensors(tensors, pin=DEVICE == "cuda")
        lane = lane or PrefetchLane(store.layout, NUM_PROGRAMS, torch.device(DEVICE))
        how = {"policy": "lru", "device": DEVICE, "num_programs": NUM_PROGRAMS, "lane": lane}
        layers.append(DeviceWeightProvider(store, CAPACITY, **how))
    for this, following in itertools.pairwise(layers):
        this.next_provider = following
    return layers


def of(layer: DeviceWeightProvider) -> Lookahead:
    assert layer.lookahead is not None
    return layer.lookahead


def run(layers: Sequence[DeviceWeightProvider], ids: torch.Tensor, guesses: torch.Tensor) -> None:
    """One step; layer l asks for ids[l], after layer l - 1 guessed guesses[l]."""
    for number, layer in enumerate(layers):
        found = layer.prepare(ids[number : number + 1])
        if number + 1 < len(layers):
            of(layer).guess_next(lambda n=number: scores_of(guesses[n + 1]), guesses, 4)
        rows = found.topk_ids.flatten()
        values = 100 * number + ids[number]
        assert torch.equal(found.tensors.bias[rows].long(), values)
        assert (found.tensors.w[rows] == values.view(-1, 1)).all()


def scores_of(guesses: torch.Tensor) -> torch.Tensor:
    """The likeliest first; -1 for nobody."""
    scores = torch.full((1, NUM_EXPERTS + 1), -torch.inf, device=guesses.device)
    falling = -torch.arange(len(guesses), device=guesses.device).float()
    return scores.scatter(1, guesses.long().unsqueeze(0) % (NUM_EXPERTS + 1), falling.unsqueeze(0))[
        :, :NUM_EXPERTS
    ].contiguous()


def steps(num_steps: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(num_steps, NUM_LAYERS, NUM_EXPERTS, generator=generator)
    return drawn.argsort(-1)[..., :4].to(DEVICE)


def ahead(layer: DeviceWeightProvider) -> list[int]:
    return layer.kernel.counters[Counter.AHEAD :].tolist()


def test_what_is_guessed_right_is_not_copied_on_demand() -> None:
    layers = make_layers()
    for ids in steps(6, seed=0):
        run(layers, ids, ids.int())
    assert ahead(layers[0]) == [0, 0, 0, 0]
    for layer in layers[1:]:
        issued, blocks, used, saved = ahead(layer)
        assert issued == used > 6, "up to two a step, all of them wanted"
        assert blocks == saved == issued * of(layer).prefetch.blocks_per_row
        stats = layer.stats
        assert stats.bytes_moved == stats.misses * layer.store.form.nbytes
        assert (stats.prefetches, stats.prefetch_hits) == (issued, used)
        assert stats.prefetch_bytes == issued * layer.store.form.nbytes
        assert stats.prefetch_saved_bytes == stats.prefetch_bytes


def test_wrong_guesses_cost_their_bytes_and_nothing_else() -> None:
    layers = make_layers()
    for ids in steps(6, seed=1):
        others = torch.stack(
            [torch.tensor(sorted(set(range(NUM_EXPERTS)) - set(row))[:4]) for row in ids.tolist()]
        )
        run(layers, ids, others.int().to(DEVICE))
    for layer in layers[1:]:
        issued, _, used, saved = ahead(layer)
        assert (used, saved) == (0, 0)
        stats = layer.stats
        assert stats.bytes_moved == (stats.misses + issued) * layer.store.form.nbytes
        assert stats.prefetch_bytes == issued * layer.store.form.nbytes > 0
        assert (stats.prefetch_hits, stats.prefetch_saved_bytes) == (0, 0)


def test_layers_that_are_guessed_and_on_are_counted() -> None:
    layers = make_layers()
    assert [layer.stats.prefetching_layers for layer in layers] == [0, 0, 0], "nobody guessed yet"
    ids = steps(2, seed=4)
    run(layers, ids[0], ids[0].int())
    assert [layer.stats.prefetching_layers for layer in layers] == [0, 1, 1], "the first has nobody"
    before = [layer.stats for layer in layers]
    layers[2].kernel.switch[Switch.IS_ON] = 0
    run(layers, ids[1], ids[1].int())
    stats = [layer.stats for layer in layers]
    assert stats[2].prefetches == before[2].prefetches, "off, nothing is copied ahead"
    new = total(now.since(then) for now, then in zip(stats, before, strict=True))
    assert new.prefetching_layers == 1, "a state is no count"
    assert new.prefetches == new.prefetch_hits == stats[1].prefetches - before[1].prefetches > 0
    at_once = torch.stack([layer.counters.now for layer in layers]).tolist()
    pairs = zip(layers, at_once, strict=True)
    published = [layer.counters.stats_of(counts) for layer, counts in pairs]
    assert published == stats, "as vLLM's workers publish"
    layers[1].reset_stats()
    found = layers[1].stats
    assert (found.prefetches, found.prefetch_bytes, found.prefetching_layers) == (0, 0, 1)


def test_without_a_lane_there_are_no_counters_of_it() -> None:
    store = CPUBackingStore.from_tensors({"w": torch.zeros(4, 8)}, pin=DEVICE == "cuda")
    alone = DeviceWeightProvider(store, 2, policy="lru", device=DEVICE)
    assert not any("prefetch" in name for name in alone.stats.as_dict())


def test_ranks_are_alike_however_far_prefetches_came() -> None:
    """Time decides that, on each rank for itself."""
    first, second = make_layers(), make_layers()
    for ids in steps(3, seed=5):
        run(first, ids, ids.int())
        run(second, ids, torch.full_like(ids, -1).int())
    assert first[1].stats.prefetches != second[1].stats.prefetches
    assert fingerprint(first[1]) == fingerprint(second[1])


def test_a_reset_forgets_what_came_ahead() -> None:
    layers = make_layers()
    ids = steps(1, seed=2)[0]
    layers[0].prepare(ids[:1])
    of(layers[0]).guess_next(lambda: scores_of(ids[1]), ids, 4)
    layers[1].kernel.switch.zero_()
    layers[1].reset()
    assert layers[1].kernel.switch[Switch.IS_ON] == 1
    lane = of(layers[1]).lane
    assert (lane.ahead.words == NOBODY).all()
    lane.ahead.buffer.fill_(-7)
    run(layers, ids, torch.full_like(ids, -1).int())


def by_lift(num_values: int = 24) -> list[DeviceWeightProvider]:
    layers = make_layers(num_values)
    for layer in layers:
        of(layer).guess_by_lift(4)
    assert [of(layer).lift is not None for layer in layers] == [True, True, False]
    return layers


def table_of(layer: DeviceWeightProvider) -> LiftTable:
    table = of(layer).lift
    assert table is not None
    return table


def ask(
    layers: Sequence[DeviceWeightProvider], ids: torch.Tensor, *, prefill: bool = False
) -> list[ExpertWeightResult]:
    """One step as an engine has it; layer l asks for ids[l], `[T, K]`."""
    found = []
    for layer, wanted in zip(layers, ids, strict=True):
        with closing(layer.waves(wanted, prefill=prefill)) as waves:
            found.append(next(waves))
            of(layer).look(wanted, wanted, None, prefill=prefill)
    return found


def test_lift_tables_prefetch_what_their_specification_ranks_first() -> None:
    """And take what they learned from the step before at the earliest."""
    layers, spec = by_lift(), CrossLift(NUM_LAYERS, NUM_EXPERTS, 4)
    draw = torch.Generator().manual_seed(6)
    for topic in torch.randint(0, 3, (12,), generator=draw).tolist():
        step = [
            [(4 * topic + 5 * number + n) % NUM_EXPERTS for n in range(4)] for number in (0, 1, 2)
        ]
        slots = [layer.slot_of for layer in layers]
        before = [ahead(layer)[AheadCounter.ISSUED] for layer in layers]
        wanted = []
        for number, demand in enumerate(step):
            spec.observe(number, demand)
            if number + 1 < NUM_LAYERS:
                order = np.argsort(-spec.guess(number + 1), kind="stable")[:6].tolist()
                wanted.append([e for e in order if slots[number + 1][e] < 0][:2])
        ask(layers, torch.tensor(step, device=DEVICE).unsqueeze(1))
        for layer, then, guessed in zip(layers[1:], before[1:], wanted, strict=True):
            assert ahead(layer)[AheadCounter.ISSUED] - then == len(guessed)
        experts = of(layers[0]).lane.ahead.words[0, Word.EXPERTS :].tolist()
        assert experts[: len(wanted[-1])] == wanted[-1]
    for number, layer in enumerate(layers[:-1]):
        counted = table_of(layer).counts[:-1, :-1].cpu()
        assert torch.equal(counted, torch.from_numpy(spec.together[number + 1]))
    assert sum(ahead(layer)[AheadCounter.USED] for layer in layers) > 6


def test_a_prefill_is_counted_and_guesses_nothing() -> None:
    layers = by_lift()
    ids = torch.stack([steps(9, seed=number)[:, number] for number in range(NUM_LAYERS)])
    ask(layers, ids, prefill=True)
    assert [ahead(layer)[AheadCounter.ISSUED] for layer in layers] == [0, 0, 0]
    for layer in layers[:-1]:
        assert table_of(layer).counts[-1, -1] == 9


def test_padding_is_neither_counted_nor_guessed_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured call's tokens beyond the count on the device."""
    count = TokenCount(torch.device(DEVICE))
    monkeypatch.setattr(count, "of_this_call", lambda: count._in_graphs)
    ids = steps(5, seed=7).transpose(0, 1).contiguous()
    padded, plain = by_lift(), by_lift()
    for layer in padded:
        layer.token_count = count
    for _ in range(4):
        count.expect(2)
        ask(padded, ids)
        ask(plain, ids[:, :2])
    for one, other in zip(padded, plain, strict=True):
        assert one.slot_of == other.slot_of
    for one, other in zip(padded[:-1], plain[:-1], strict=True):
        assert torch.equal(table_of(one).counts, table_of(other).counts)
        assert table_of(one).counts[-1, -1] == 8
    some, scores = padded[1], torch.zeros(5, NUM_EXPERTS, device=DEVICE)
    absent = [e for e, slot in enumerate(some.slot_of) if slot < 0]
    scores[:, absent[3]] = 1  # but it is padding that says so
    scores[:2, absent[3]] = -1
    scores[:2, absent[2]] = 0.5
    with closing(padded[0].waves(ids[0])) as waves:
        next(waves)
        of(padded[0]).look(ids[0], scores, lambda hidden: hidden)
    assert of(some).lane.ahead.words[0, Word.EXPERTS] == absent[2]


def test_a_layer_that_was_called_alone_is_counted_for_nobody() -> None:
    layers, ids = by_lift(), steps(1, seed=8)[0].unsqueeze(1)
    table = table_of(layers[0])
    ask(layers[1:], ids[1:])
    ask(layers[:1], ids[:1])
    ask(layers[1:2], ids[1:2].expand(-1, 3, -1))
    assert not table.counts.any(), "another number of tokens is another call"
    ask(layers[1:2], ids[1:2])
    assert not table.counts.any(), "what it was asked for is forgotten by then"
    ask(layers, ids)
    assert table.counts[-1, -1] == 1


def test_a_reset_forgets_lift_tables_and_counters_do_not() -> None:
    layers, ids = by_lift(), steps(1, seed=9)[0].unsqueeze(1)
    tables = [table_of(layer) for layer in layers[:-1]]
    ask(layers, ids)
    for layer in layers:
        layer.reset_stats()
    assert [float(t.counts[-1, -1]) for t in tables] == [1, 1]
    for layer in layers:
        layer.reset()
    assert [float(t.counts.sum()) for t in tables] == [0, 0]
    assert [layer.lift_nbytes for layer in layers] == [4 * (17 * 17 + 18 * 16)] * 2 + [0]


def test_without_a_lane_there_is_no_table() -> None:
    stores = [CPUBackingStore.from_tensors({"w": torch.zeros(4, 8)}, pin=DEVICE == "cuda")] * 2
    first, second = (DeviceWeightProvider(s, 2, policy="lru", device=DEVICE) for s in stores)
    first.next_provider = second
    assert first.lookahead is None
    assert first.lift_nbytes == 0


def test_nothing_holds_layers_that_are_dropped() -> None:
    """Their slots are free at once, though each was told of the next one."""
    layers = by_lift()
    ask(layers, steps(1, seed=11)[0].unsqueeze(1))
    are_there = [weakref.ref(layer) for layer in layers]
    gc.disable()
    try:
        del layers
        assert [is_there() for is_there in are_there] == [None] * NUM_LAYERS
    finally:
        gc.enable()


@pytest.mark.gpu
def test_lift_tables_learn_inside_a_graph() -> None:
    """The same counts as by eager calls, and the right bytes in every slot."""
    layers, eager = by_lift(num_values=1 << 16), by_lift(num_values=1 << 16)
    ids = torch.zeros(NUM_LAYERS, 1, 4, dtype=torch.int64, device="cuda")
    all_ids = steps(40, seed=10).unsqueeze(2)
    ask(layers, all_ids[0])
    for layer in layers:
        layer.reset()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [r.tensors.bias[r.topk_ids.flatten()] for r in ask(layers, ids)]
    for now in all_ids:
        ids.copy_(now)
        graph.replay()
        ask(eager, now)
        for number, values in enumerate(found):
            assert torch.equal(values.long(), 100 * number + now[number].flatten())
    for one, other in zip(layers[:-1], eager[:-1], strict=True):
        assert torch.equal(table_of(one).counts, table_of(other).counts)
        assert table_of(one).counts[-1, -1] == 40


@pytest.mark.gpu
def test_prefetches_inside_a_graph() -> None:
    """The side stream forks and joins in the capture; replays with other ids and guesses; large
    rows, so that plans come while copies run."""
    layers = make_layers(num_values=1 << 20)
    ids, guesses = (torch.zeros(NUM_LAYERS, 4, dtype=kind, device="cuda") for kind in (int, int))
    guesses = guesses.int()
    all_ids = steps(60, seed=3)
    run(layers, all_ids[0], all_ids[0].int())
    for layer in layers:
        layer.reset()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    found = []
    with torch.cuda.graph(graph):
        for number, layer in enumerate(layers):
            result = layer.prepare(ids[number : number + 1])
            if number + 1 < NUM_LAYERS:
                of(layer).guess_next(lambda n=number: scores_of(guesses[n + 1]), guesses, 4)
            rows = result.topk_ids.flatten()
            found.append((result.tensors.bias[rows], result.tensors.w[rows].amin(1)))
            found[-1] += (result.tensors.w[rows].amax(1),)
    for step, now in enumerate(all_ids):
        ids.copy_(now)
        guesses.copy_(now if step % 3 else now.flip(0))
        graph.replay()
        for number, values in enumerate(found):
            for value in values:
                assert torch.equal(value.long(), 100 * number + now[number]), (step, number)
    issued, blocks, used, saved = ahead(layers[2])
    assert issued > used > 0, "a third of its guesses is another layer's demand"
    assert blocks > saved > 0
    assert AheadCounter.SAVED == 3
