"""What a log probability may be off by: as the resident model's own rounding has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hotexperts.bench.vllm import measure

TOGETHER = [([5, 6], [-1.0, -2.0]), ([7, 8], [-3.0, -4.0])]


class Rows:
    """Answers one row at a time, its last log probability off by so much."""

    def __init__(self, off_by: float) -> None:
        self._off_by = off_by

    def likeliest(self, rows: Any, prompt_tokens: int, num_tokens: int) -> Any:
        (row,) = rows
        tokens, (first, last) = TOGETHER[row]
        return [(tokens, [first, last + self._off_by])]


def tolerance(off_by: float, quantization: str | None) -> float:
    shape = SimpleNamespace(quantization=quantization)
    asked: Any = SimpleNamespace(batches=(1, 2), shape=shape, prompt_tokens=4, steps=2)
    decoder: Any = Rows(off_by)
    return measure._tolerance(decoder, asked, TOGETHER)


@pytest.mark.parametrize(
    ("off_by", "quantization", "on_gpu", "on_cpu"),
    [
        (0.2, "mxfp4", 0.4, 0.4),
        (0.01, "mxfp4", 0.3, 0.05),
        (5.0, "mxfp4", 0.8, 0.8),
        (0.2, None, 0.0, 0.4),
    ],
)
def test_twice_the_rounding_between_bounds(
    off_by: float,
    quantization: str | None,
    on_gpu: float,
    on_cpu: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_gpu, expected in ((True, on_gpu), (False, on_cpu)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_gpu=is_gpu: is_gpu)
        assert tolerance(off_by, quantization) == pytest.approx(expected)
