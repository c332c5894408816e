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
from hotexperts.kernels.gather.ahead import NOBODY, AheadCounter
from hotexperts.kernels.plan import Counter

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


def test_a_reset_forgets_what_came_ahead() -> None:
    layers = make_layers()
    ids = steps(1, seed=2)[0]
    layers[0].prepare(ids[:1])
    layers[0].guess_next(lambda: scores_of(ids[1]), ids, 4)
    layers[1].reset()
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
