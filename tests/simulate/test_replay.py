"""Replays worked by hand, and against models that scan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotexperts.errors import ConfigError
from hotexperts.policy import POLICIES
from hotexperts.simulate import Outcome, Rules, Trace, belady, replay
from hotexperts.simulate.replay import misses_by_step
from hotexperts.simulate.rules import Sequences
from hotexperts.simulate.schedule import LayerCall, Step, layer_calls, schedule
from hotexperts.simulate.trace import use_by_layer
from simulate.models import batched_calls, lettered, lru_hits, most_hits, token_calls


def counts(outcome: Outcome) -> tuple[int, int]:
    return outcome.total.hits, outcome.total.misses


@st.composite
def traces(draw: st.DrawFn, *, prefill: bool = True, num_experts: int = 6) -> Trace:
    """A few short sequences in 2 layers, 2 distinct experts a token."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_tokens = sum(lengths)
    ids = rng.random((num_tokens, 2, num_experts)).argsort(axis=2)[..., :2]
    phase = np.concatenate([np.arange(n) >= (n // 2 if prefill else 0) for n in lengths])
    seq = np.repeat(np.arange(len(lengths)), lengths)
    return Trace(ids, phase.astype(int), seq, {"n_experts": num_experts})


@pytest.mark.parametrize(
    ("text", "capacity", "hits_and_misses"),
    [
        ("A B A C B", 2, (1, 4)),  # C takes B's place, and B comes back
        ("A B A B C", 2, (2, 3)),
        ("A B C A B", 2, (0, 5)),  # a cycle longer than the cache
        ("A B C A B", 3, (2, 3)),
        ("AB AC AB", 2, (2, 4)),  # A is needed by every call and never leaves
        ("ABC ABC", 2, (2, 4)),  # over capacity: A and B enter, C passes by
    ],
)
def test_lru_by_hand(text: str, capacity: int, hits_and_misses: tuple[int, int]) -> None:
    assert counts(replay(lettered(text), "lru", capacity)) == hits_and_misses


def test_belady_by_hand() -> None:
    # A and B stay, C passes by: LRU has no hit here.
    assert counts(belady(lettered("A B C A B"), 2)) == (2, 3)
    # D is of no more use, so A, B and C stay, of which two fit.
    assert counts(belady(lettered("ABC D ABC"), 2)) == (2, 5)
    # A warm prefill is played and not counted.
    assert counts(belady(lettered("a b A B"), 2)) == (2, 0)


def test_a_warm_prefill_is_played_and_not_counted() -> None:
    assert counts(replay(lettered("a b c C A"), "lru", 2, prefill="warm")) == (1, 1)


def test_a_seeded_prefill_takes_free_slots_only() -> None:
    outcome = replay(lettered("a b c A B C"), "lru", 2, prefill="seed")
    assert counts(outcome) == (2, 1)  # A and B came in, C did not
    assert counts(replay(lettered("a B", "c d B"), "lru", 3, prefill="seed")) == (1, 1)


def test_a_seeded_prefill_evicts_nobody() -> None:
    trace = lettered("A B", "cd A B")
    assert counts(replay(trace, "lru", 2, prefill="seed")) == (2, 2)
    assert counts(replay(trace, "lru", 2, prefill="warm")) == (0, 4)


def test_a_seeded_prefill_is_one_call_with_its_tokens_counted() -> None:
    trace = lettered("ab bc C")
    calls = list(layer_calls(trace, schedule(trace, 1, "seed"), 0))
    assert calls == [
        LayerCall([0, 1, 2], [1, 2, 1], counted=False, evict=False),
        LayerCall([2], [1], counted=True, evict=True),
    ]


def test_calls_of_a_step_read_that_step_alone() -> None:
    """Prefetches are replayed step by step, which took the square of a trace's length."""

    class Watched(np.ndarray):
        def tolist(self) -> Any:
            sizes.append(self.size)
            return super().tolist()

    sizes: list[int] = []
    ids = np.arange(1000 * 2 * 3).reshape(1000, 2, 3).view(Watched)
    step = Step([700, 3], counted=True, evict=True, number=5)
    calls = list(layer_calls(cast("Trace", SimpleNamespace(ids=ids)), [step], 0, 1))
    assert [call.demand for call in calls] == [
        [*range(18 + at, 21 + at), *range(4200 + at, 4203 + at)] for at in (0, 3)
    ]
    assert sizes == [6, 6]


def test_an_ignored_prefill_is_not_played() -> None:
    assert counts(replay(lettered("a b c C A"), "lru", 2, prefill="ignore")) == (0, 2)


def test_lanes_take_the_next_sequence_when_theirs_ends() -> None:
    # Steps: A+C, B+C, D+C: the first lane takes up D when B is done. It finds no more for a
    # fourth step, so the last C is not played.
    outcome = replay(lettered("A B", "C C C C", "D"), "lru", 4, batch=2)
    assert (outcome.total.calls, *counts(outcome)) == (3, 2, 4)
    # A distinct expert counts once a call, however many tokens ask for it.
    assert counts(replay(lettered("A A", "A A"), "lru", 1, batch=2)) == (1, 1)


def test_a_prefill_comes_when_its_lane_takes_up_the_sequence() -> None:
    # c is played after A B, so that C hits; before them it would have been evicted.
    assert counts(replay(lettered("A B", "c C"), "lru", 1)) == (1, 2)
    assert counts(replay(lettered("A", "b c"), "lru", 1)) == (0, 1)  # a prompt without an answer


def test_layers_are_counted_apart_and_a_layer_without_a_record_is_not_called() -> None:
    ids = np.array([[[0, 1], [-1, -1]], [[0, 2], [3, -1]], [[0, 1], [3, -1]]])
    outcome = replay(Trace(ids, np.ones(3, int), np.zeros(3, int)), "lru", 3)
    assert [(layer.calls, layer.hits, layer.misses) for layer in outcome.layers] == [
        (3, 3, 3),
        (2, 1, 1),
    ]
    assert outcome.total.demands == 8


@given(traces(), st.integers(1, 6))
def test_replay_is_the_lru_that_scans(trace: Trace, capacity: int) -> None:
    outcome = replay(trace, "lru", capacity)
    expected = [lru_hits(token_calls(trace, layer), capacity) for layer in range(2)]
    assert [layer.hits for layer in outcome.layers] == expected
    assert outcome.total.demands == int((trace.ids[trace.phase == 1] >= 0).sum())


@given(traces(prefill=False), st.integers(1, 6), st.data())
def test_batches_are_the_ones_that_counting_gives(
    trace: Trace, capacity: int, data: st.DataObject
) -> None:
    batch = data.draw(st.integers(1, len(trace.sequences())))
    outcome = replay(trace, "lru", capacity, batch)
    calls = [batched_calls(trace, layer, batch) for layer in range(2)]
    assert [layer.hits for layer in outcome.layers] == [lru_hits(c, capacity) for c in calls]
    assert outcome.total.demands == sum(len(experts) for c in calls for experts, _ in c)


@given(traces(prefill=False), st.integers(1, 6), st.data())
@settings(max_examples=30)
def test_no_policy_beats_belady(trace: Trace, capacity: int, data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, len(trace.sequences())))
    bound = belady(trace, capacity, batch)
    for policy in POLICIES.names():
        outcome = replay(trace, policy, capacity, batch)
        for layer, most in zip(outcome.layers, bound.layers, strict=True):
            assert layer.demands == most.demands
            assert layer.hits <= most.hits, policy


@given(traces(prefill=False, num_experts=4), st.integers(1, 3))
@settings(max_examples=30)
def test_belady_is_the_best_of_all_choices(trace: Trace, capacity: int) -> None:
    bound = belady(trace, capacity)
    expected = [most_hits(token_calls(trace, layer), capacity) for layer in range(2)]
    assert [layer.hits for layer in bound.layers] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity 0.*8 experts"),
        ({"capacity": 9}, "give 1 to 8"),
        ({"batch": 3}, "batch 3: the trace has 2 sequences"),
        ({"batch": 0}, "give 1 to 2"),
        ({"prefill": "boil"}, "prefill 'boil': give one of warm, seed, ignore"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, object], message: str) -> None:
    options: dict[str, object] = {"capacity": 2, **arguments}
    for play in (belady, lambda trace, **rest: replay(trace, "lru", **rest)):
        with pytest.raises(ConfigError, match=message):
            play(lettered("A B", "C"), **options)  # type: ignore[operator]


def test_an_unknown_policy_and_a_trace_without_decode_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown policy 'clock'"):
        replay(lettered("A"), "clock", 1)
    with pytest.raises(ConfigError, match="no decode tokens"):
        replay(lettered("a b"), "lru", 1)


def test_use_counts_decode_layer_by_layer() -> None:
    ids = np.array([[[0, 1], [2, 3]], [[0, 1], [2, -1]], [[0, 3], [1, 2]]])
    trace = Trace(ids, np.array([0, 1, 1]), np.zeros(3, int), {"n_experts": 4})
    assert use_by_layer(trace).tolist() == [[2, 1, 0, 1], [0, 4 / 3, 8 / 3, 0]]
    prompts = Trace(ids, np.zeros(3, int), np.zeros(3, int), {"n_experts": 4})
    assert use_by_layer(prompts)[0].tolist() == [2, 4 / 3, 0, 2 / 3]


def test_misses_of_each_step_by_hand() -> None:
    assert misses_by_step(lettered("A B A C B"), "lru", 2).tolist() == [[1], [1], [0], [1], [1]]
    both = misses_by_step(lettered("a A B A C B", "b B"), "lru", 2)
    assert both.tolist() == [[0], [1], [0], [1], [1], [0]], "prompts are played, not counted"


@given(trace=traces(), batch=st.integers(1, 2), rules=st.sampled_from(["warm", "cold"]))
@settings(deadline=None, max_examples=50)
def test_misses_of_steps_add_up_to_those_of_the_replay(
    trace: Trace, batch: int, rules: Sequences
) -> None:
    batch = min(batch, len(trace.sequences()))
    options = ("adv", 3, batch, "warm", Rules(sequences=rules))
    steps = misses_by_step(trace, *options)
    whole = replay(trace, *options)
    assert steps.sum(axis=0).tolist() == [layer.misses for layer in whole.layers]
    assert len(steps) == sum(step.counted for step in schedule(trace, batch, "warm"))
