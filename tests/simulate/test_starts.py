"""What caches begin with: nothing or the hottest experts, once or after each sequence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotexperts.errors import ConfigError
from hotexperts.policy import POLICIES
from hotexperts.simulate import Rules, Trace, belady, bound, replay
from hotexperts.simulate.schedule import cut_at_ends, schedule
from simulate.models import layered, lettered
from simulate.test_replay import traces

COLD = Rules(sequences="cold")
PROMPTS = Rules(preload="trace")


def split_up(trace: Trace) -> list[Trace]:
    return [
        Trace(trace.ids[rows], trace.phase[rows], trace.seq[rows], trace.meta)
        for rows in trace.sequences()
    ]


def test_cold_empties_the_caches_when_a_sequence_ends() -> None:
    trace = lettered("A B A", "A B A")
    for policy in ("lru", "adv", "arc"):
        assert replay(trace, policy, 2).total.hits == 4
        assert replay(trace, policy, 2, rules=COLD).total.hits == 2
    assert belady(trace, 2, rules=COLD).total.hits == 2
    assert bound("infinite", trace, 2, rules=COLD).total.hits == 2


def test_cold_forgets_what_policies_know() -> None:
    # In the second sequence A is no more frequent than C, and as the lower id it leaves.
    trace = lettered("A A A A", "A C D A")
    assert replay(trace, "lfu", 2).total.hits == 3 + 2
    assert replay(trace, "lfu", 2, rules=COLD).total.hits == 3


def test_cold_is_one_replay_a_sequence() -> None:
    trace = lettered("ab A BC A", "c AC B A", "b B BC A")
    for policy in POLICIES.names():
        alone = [replay(part, policy, 2).total.hits for part in split_up(trace)]
        assert replay(trace, policy, 2, rules=COLD).total.hits == sum(alone), policy


@given(traces(), st.integers(1, 6))
def test_a_cold_pool_is_one_replay_a_sequence(trace: Trace, capacity: int) -> None:
    rules = Rules(sequences="cold", pool="global")
    parts = [part for part in split_up(trace) if part.phase.any()]
    for policy in ("lru", "llru", "ewma"):
        alone = [replay(p, policy, capacity, rules=Rules(pool="global")).total.hits for p in parts]
        assert replay(trace, policy, capacity, rules=rules).total.hits == sum(alone)


def test_in_a_batch_any_lane_empties_the_caches() -> None:
    # Steps: A+C, B+C | D+C; the first lane's sequence ends after two.
    trace = lettered("A B", "C C C C", "D")
    steps = schedule(trace, 2, "warm")
    assert [len(run) for run in cut_at_ends(trace, steps)] == [2, 1]
    assert replay(trace, "lru", 4, batch=2).total.hits == 2
    assert replay(trace, "lru", 4, batch=2, rules=COLD).total.hits == 1


def test_a_preload_is_the_hottest_of_the_prompts() -> None:
    # B, asked for twice, and of A, C and D, once each, the lowest id.
    trace = lettered("bd bc a B A C")
    found = replay(trace, "lru", 2, prefill="ignore", rules=PROMPTS).total
    assert (found.hits, found.misses) == (2, 1)
    assert replay(trace, "lru", 2, prefill="ignore").total.hits == 0
    assert replay(trace, "static", 2, prefill="ignore", rules=PROMPTS).total.hits == 2


def test_a_preload_from_another_trace_counts_all_its_tokens() -> None:
    trace = lettered("A B C")
    rules = Rules(preload=lettered("c C B D"))
    assert replay(trace, "lru", 1, rules=rules).total.hits == 0  # C, which A drives out
    assert replay(trace, "static", 1, rules=rules).total.hits == 1
    assert replay(trace, "lru", 8, rules=rules).total.hits == 2  # A was in no profile
    assert bound("infinite", trace, 1, rules=rules).total.hits == 1


def test_a_preload_comes_again_after_a_cold_start() -> None:
    trace = lettered("a A B", "A B")
    rules = Rules(preload="trace", sequences="cold")
    assert replay(trace, "lru", 1, prefill="ignore", rules=rules).total.hits == 2
    assert replay(trace, "lru", 1, prefill="ignore", rules=PROMPTS).total.hits == 1


@pytest.mark.parametrize("pool", ["layer", "global", "split"])
def test_a_preload_of_every_expert_never_misses(pool: str) -> None:
    trace = layered("A/B C/D", "B/A D/C", num_experts=4)
    rules = Rules(preload=trace, pool=pool)  # type: ignore[arg-type]
    for policy in ("lru", "ewma"):
        assert replay(trace, policy, 4, rules=rules).total.misses == 0
    assert bound("belady-forced", trace, 4, rules=rules).total.misses == 0


def test_the_hottest_of_all_layers_fill_a_pool() -> None:
    # Layer 0's A and B are asked for most; layer 1's C, once, finds no slot.
    trace = layered("a/- b/- ab/c A/- B/- A/C")
    found = replay(trace, "llru", 1, prefill="ignore", rules=Rules(preload="trace", pool="global"))
    assert [layer.hits for layer in found.layers] == [3, 0]


@given(traces(), st.integers(1, 6), st.sampled_from(POLICIES.names()))
def test_any_policy_takes_a_preload(trace: Trace, capacity: int, policy: str) -> None:
    rules = Rules(preload=trace, sequences="cold")
    most = bound("infinite", trace, capacity, rules=rules).total
    assert replay(trace, policy, capacity, rules=rules).total.hits <= most.hits


def test_a_preload_that_fits_no_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="preload 'trace': the trace has no prefill: preload"):
        replay(lettered("A"), "lru", 1, rules=PROMPTS)
    rules = Rules(preload=layered("A/B"))
    with pytest.raises(ConfigError, match="has 2 layers of 8 experts, the replayed one 1 of 8"):
        belady(lettered("A"), 1, rules=rules)
