"""What `bench/two_gpu.py` is made of, on two ranks of a CPU: stamps, counters, other slots."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
NUM_STEPS = 5


@pytest.mark.parametrize("case", ["tp", "ep"])
def test_ranks_stamp_their_all_reduces(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked follows from given ids, and every counted byte has its step and layer."""
    if torch.cuda.is_available():
        pytest.skip("vLLM is one for GPUs here")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    import stamps
    import two_gpu
    from vllm_ranks import Ranks

    num_layers, top_k = two_gpu.SMALL_SHAPE["num_hidden_layers"], 8
    ids = np.zeros((16, num_layers, 1, top_k), np.uint8)
    for step in range(len(ids)):  # eight experts that no step before asked for
        ids[step] = (np.arange(top_k) * 16 + step) % 128
    options = two_gpu.options(case, is_small=True)
    ranks = Ranks(tmp_path, two_gpu.SMALL_SHAPE, ids, **options)
    try:
        ranks.use(16, is_stamped=True)
        taken, found = ranks.decode(1, 2, NUM_STEPS, is_recorded=True)
    finally:
        ranks.close()
    assert taken["ms"] > 0
    times, moved = (np.stack([rank[name] for rank in found]) for name in ("times", "moved"))
    assert times.shape == (2, NUM_STEPS, 1 + 2 * num_layers, 2)
    assert (np.diff(times.reshape(2, -1), axis=1) > 0).all()
    counts = [rank["counts"] for rank in found]
    assert moved.sum((1, 2)).tolist() == [count["bytes_moved"] for count in counts]
    asked = [count["hits"] + count["misses"] for count in counts]
    expert_nbytes = 3 * 128 * 64 * 4
    if case == "tp":
        assert asked == [top_k * num_layers * NUM_STEPS] * 2
        assert moved.sum(axis=(1, 2)).tolist() == [c["misses"] * expert_nbytes // 2 for c in counts]
        assert stamps.spreads(times, moved)["uneven_gb"] == 0
    else:
        assert asked == [top_k // 2 * num_layers * NUM_STEPS] * 2  # 0, 16, 32, 48 are the first's
        assert moved.sum(axis=(1, 2)).tolist() == [c["misses"] * expert_nbytes for c in counts]
    assert counts[0]["misses"] > 0
    assert sum(rank["host"] for rank in ranks.facts) == num_layers * 128 * expert_nbytes
