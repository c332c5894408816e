"""Layers that prefetch for each other: the same bytes in every slot, whatever was guessed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import pytest
import torch

from hotexperts.cache import CPUBackingStore
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.cache.prefetch import PrefetchLane
from hotexperts.integrations.vllm.ranks import fingerprint
from hotexperts.kernels.gather.ahead import NOBODY, AheadCounter
from hotexperts.kernels.plan import Counter
from hotexperts.kernels.prefetch.switch import Switch
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


def run(layers: Sequence[DeviceWeightProvider], ids: torch.Tensor, guesses: torch.Tensor) -> None:
    """One step; layer l asks for ids[l], after layer l - 1 guessed guesses[l]."""
    for number, layer in enumerate(layers):
        found = layer.prepare(ids[number : number + 1])
        if number + 1 < len(layers):
            layer.guess_next(lambda n=number: scores_of(guesses[n + 1]), guesses, 4)
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
        assert blocks == saved == issued * layer.prefetch.blocks_per_row
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
    at_once = torch.stack([layer.counts for layer in layers]).tolist()
    pairs = zip(layers, at_once, strict=True)
    assert [layer.stats_of(counts) for layer, counts in pairs] == stats, "as vLLM's workers publish"
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
    layers[0].guess_next(lambda: scores_of(ids[1]), ids, 4)
    layers[1].kernel.switch.zero_()
    layers[1].reset()
    assert layers[1].kernel.switch[Switch.IS_ON] == 1
    lane = layers[1]._lane
    assert lane is not None
    assert (lane.ahead.words == NOBODY).all()
    lane.ahead.buffer.fill_(-7)
    run(layers, ids, torch.full_like(ids, -1).int())


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
                layer.guess_next(lambda n=number: scores_of(guesses[n + 1]), guesses, 4)
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
