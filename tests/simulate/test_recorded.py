"""The published figures for recorded routing, where the recordings are at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotexperts.simulate import belady, read_trace, replay
from simulate.models import batched_calls, lru_hits, token_calls

TRACES = Path(__file__).parents[3] / "shared/traces"
QWEN, GPT_OSS = "bigmoeonedge_qwen", "bigmoeonedge_gptoss"
GRANITE, SYNTHETIC = "onnxgenai_granite3_1b_a400m", "SYNTHETIC_q3like_48x300"
POINT = 0.1 + 0.001  # percentage points; the figures are rounded to one decimal

needs_traces = pytest.mark.skipif(
    not TRACES.is_dir(), reason="needs the recorded traces beside the repository"
)

FIGURES = [  # trace, slots, LRU, LRU with ties by the router's order, Belady
    (QWEN, 16, 61.4, 61.5, 78.4),
    (QWEN, 32, 81.8, 81.8, 91.8),
    (QWEN, 64, 95.8, 95.8, 96.9),
    (GPT_OSS, 16, 65.8, 65.8, 80.5),
    (GPT_OSS, 32, 80.3, 80.3, 88.3),
    (GRANITE, 4, 23.2, 25.6, 39.2),
    (GRANITE, 8, 42.8, 42.8, 62.6),
    (GRANITE, 16, 73.7, 74.0, 87.2),
    (GRANITE, 24, 91.9, 92.0, 96.9),
]


@needs_traces
@pytest.mark.parametrize(("name", "slots", "by_id", "by_order", "bound"), FIGURES)
def test_batch_1(name: str, slots: int, by_id: float, by_order: float, bound: float) -> None:
    trace = read_trace(TRACES / f"{name}.npz")
    counted = replay(trace, "lru", slots).total
    assert 100 * counted.hit_rate == pytest.approx(by_id, abs=POINT)
    assert 100 * belady(trace, slots).total.hit_rate == pytest.approx(bound, abs=POINT)
    calls = [token_calls(trace, layer) for layer in range(trace.num_layers)]
    assert counted.hits == sum(lru_hits(layer, slots) for layer in calls)
    hits = sum(lru_hits(layer, slots, listed=True) for layer in calls)
    assert 100 * hits / counted.demands == pytest.approx(by_order, abs=POINT)


@needs_traces
@pytest.mark.parametrize(
    ("batch", "slots", "lru", "bound"), [(8, 32, 42.3, 63.1), (32, 16, 14.2, 16.0)]
)
def test_batches(batch: int, slots: int, lru: float, bound: float) -> None:
    # The published table (42.8 and 61.9, 15.2 and 15.6) is of another draw of the generator.
    trace = read_trace(TRACES / f"{SYNTHETIC}.npz")
    found = replay(trace, "lru", slots, batch)
    assert found.layers[0].hits == lru_hits(batched_calls(trace, 0, batch), slots)
    assert 100 * found.total.hit_rate == pytest.approx(lru, abs=POINT)
    best = belady(trace, slots, batch).total.hit_rate
    assert 100 * best == pytest.approx(bound, abs=POINT)


@needs_traces
def test_the_layout_by_sequence() -> None:
    trace = read_trace(TRACES / "moe507m_dev.npz")
    assert trace.ids.shape == (48 * 384, 12, 8)
    assert int(trace.phase.sum()) == 48 * 256
    assert trace.num_experts == 64
