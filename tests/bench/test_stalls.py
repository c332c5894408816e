"""What the benchmark of two GPUs makes of ranks' clocks, and of its rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import links
import stamps
import two_gpu


def stamped(arrivals_us: list[list[float]], clocks_us: list[float]) -> Any:
    """Times of ranks that leave each all-reduce 3 us after the last has come: `[R, 1, C, 2]`."""
    arrived = np.array(arrivals_us)
    left = np.broadcast_to(arrived.max(0) + 3, arrived.shape)
    times = np.stack([arrived, left], axis=-1) + np.array(clocks_us)[:, None, None]
    return (1000 * times).astype(np.int64)[:, None]


def test_spreads_need_no_common_clock() -> None:
    """One layer: embedding, attention, experts. Rank 1 comes 40 us late to the last; its clock is
    an hour ahead."""
    times = stamped([[10, 20, 50], [10, 22, 90]], [0, 3.6e9])
    twice = np.concatenate([times, times + 200_000], axis=1)
    moved = np.array([[[1_000_000]] * 2, [[3_000_000]] * 2])
    found = stamps.spreads(twice, moved)
    assert found["spread_us"] == {"median": 40, "p90": 40, "max": 40, "mean": 40}
    assert found["spread_after_attention_us"]["max"] == 2
    assert found["departures_differ_us"]["max"] == 0
    assert found["spread_ms_a_step"] == 0.04
    assert found["uneven_ms"] == 0.02  # had both come after 70 us
    assert found["uneven_gb"] == 0.001
    assert found["step_ms"] == 0.2
    assert found["moved_gb_by_rank"] == [0.001, 0.003]


def test_departures_that_differ_are_the_error() -> None:
    times = stamped([[10, 20, 50], [10, 20, 50]], [0, 70])
    times[1, 0, 2, 1] += 5_000
    found = stamps.spreads(np.repeat(times, 2, axis=1), np.ones((2, 2, 1), np.int64))
    assert found["departures_differ_us"]["max"] == 5
    assert found["spread_us"]["max"] == 5  # and that is how wrong it is


def test_other_all_reduces_than_expected_are_refused() -> None:
    times = stamped([[10, 20], [10, 20]], [0, 0])
    with pytest.raises(ValueError, match="2 all-reduces and 1 layers"):
        stamps.spreads(times, np.ones((2, 1, 1), np.int64))


def test_rows_are_compared_with_one_gpu_and_with_the_link() -> None:
    table: dict[str, Any] = {
        "link": {
            "gpus": [
                {"gb_s": {"copy_": {"alone": 50.0, "together": 40.0}}},
                {"gb_s": {"copy_": {"alone": 52.0, "together": 44.0}}},
            ]
        },
        "one": row(start=60, load=40, ms=9.4, all_hits=2.4, missed=[0.376], host=[1000]),
        "tp": row(start=66, load=20, ms=5.4, all_hits=1.4, missed=[0.188] * 2, host=[500, 520]),
    }
    table["tp"]["runs"]["25.0% of slots, batch 1"]["stalls"] = {"uneven_gb": 0.004}
    more = two_gpu.compare(table)
    assert more["link_gb_s"] == {"alone": 50.0, "together": 40.0}
    assert more["two_of_one"] == {"tp": {"start": 1.1, "load": 0.5, "host": 1.02}}
    one, two = (table[case]["runs"]["25.0% of slots, batch 1"] for case in ("one", "tp"))
    assert one["floor_ms"] == pytest.approx(2.4 + 376 / 50 / 0.94)
    assert two["floor_ms"] == pytest.approx(1.4 + 188 / 40 / 0.94)
    assert two["times_one_gpu"] == pytest.approx(9.4 / 5.4)
    assert two["stalls"]["uneven_ms_from_bytes"] == pytest.approx(0.1)
    assert "times_one_gpu" not in one


def row(
    *, start: float, load: float, ms: float, all_hits: float, missed: list[float], host: list[int]
) -> dict[str, Any]:
    return {
        "start_seconds": start,
        "ranks": [{"load_seconds": load, "host": nbytes} for nbytes in host],
        "runs": {
            "25.0% of slots, batch 1": {"ms": ms, "missed_gb_by_rank": missed},
            "100.0% of slots, batch 1": {
                "ms": all_hits,
                "missed_gb_by_rank": [0.0 for _ in missed],
            },
        },
    }


def test_lists_of_cpus_are_read() -> None:
    assert links._cpus("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert links._cpus("\n") == []
