"""What prefetch is to reach on recorded routing, where the recordings are at hand."""

from __future__ import annotations

import numpy as np
import pytest

from hotexperts.predict import PREDICTORS
from hotexperts.simulate import Trace, belady
from hotexperts.simulate.foretell import hints_of
from hotexperts.simulate.prefetch import Prefetch
from hotexperts.simulate.prefetch_replay import replay_prefetch
from hotexperts.simulate.schedule import layer_calls, schedule
from simulate.test_recorded import QWEN, needs_traces, recorded

UNLIMITED = Prefetch(slack="unlimited")


def of_sequences(trace: Trace, *numbers: int) -> Trace:
    kept = np.isin(trace.seq, numbers)
    guesses = {tap: found[kept] for tap, found in trace.guesses.items()}
    return Trace(trace.ids[kept], trace.phase[kept], trace.seq[kept], trace.meta, guesses)


@needs_traces
def test_ids_alone_reach_the_figure_set_for_qwen3() -> None:
    """84.1 % hits in layers with a source of the same token, to become 88.5 at 1.5x bytes."""
    found = replay_prefetch(recorded(QWEN), "ewma", 32, "combined", UNLIMITED)
    later = found.layers[1:]
    demands = sum(one.demands for one in later)
    assert 100 * sum(one.hits for one in later) / demands == pytest.approx(84.1, abs=0.05)
    assert 100 * sum(one.hits + one.covered for one in later) / demands >= 88.5
    assert found.total.relative_bytes <= 1.5


@needs_traces
@pytest.mark.parametrize("name", ["gate", "combined"])
def test_a_routers_guesses_beat_a_cache_that_knows_the_future(name: str) -> None:
    trace = of_sequences(recorded("moe507m_dev"), 24, 25)
    found = replay_prefetch(trace, "adv", 16, name, UNLIMITED).total
    assert found.relative_bytes <= 1.5
    assert found.stall_free_rate > 0.85 > belady(trace, 16).total.hit_rate


@needs_traces
@pytest.mark.parametrize(("tap", "recall"), [("output", 0.83), ("input", 0.77)])
def test_the_recall_of_the_routers_guesses_is_as_published(tap: str, recall: float) -> None:
    trace = of_sequences(recorded("moe507m_dev"), *range(24, 30))
    gate = PREDICTORS.load("gate")(trace.num_layers, trace.num_experts, 8, with_gate=True)
    right = demands = 0
    for step in schedule(trace, 1, "warm"):
        for call in layer_calls(trace, [step], *range(1, trace.num_layers)):
            hints = hints_of(trace, step.tokens, call, tap)  # type: ignore[arg-type]
            if step.counted:
                likeliest = np.argsort(-gate.guess(call.layer, hints), kind="stable")[:8]
                right += np.isin(call.demand, likeliest).sum()
                demands += 8
            gate.observe(call.layer, call.demand, hints)
    assert right / demands == pytest.approx(recall, abs=0.012)
