"""What `bench/olmoe.py` has layers guess: what was recorded, or what the next layer asks for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
NUM_LAYERS, TOP_K, NUM_EXPERTS = 3, 2, 64


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(4, NUM_EXPERTS, bias=False)
        self.experts = torch.nn.Identity()
        self.experts._hotexperts = SimpleNamespace(guess=None)


@pytest.mark.parametrize("is_perfect", [False, True])
def test_layers_guess_for_the_next_one(is_perfect: bool, tmp_path: Path) -> None:
    import olmoe

    ids = np.arange(NUM_LAYERS * TOP_K, dtype=np.uint8).reshape(1, 1, NUM_LAYERS, TOP_K)
    guesses = 40 + np.arange((NUM_LAYERS - 1) * 3, dtype=np.uint8).reshape(1, 1, NUM_LAYERS - 1, 3)
    np.savez(tmp_path / "t.npz", ids=ids, next_layer_from_moe_input=guesses)
    model = torch.nn.ModuleList(Block() for _ in range(NUM_LAYERS))
    replay = olmoe.Replay(tmp_path / "t.npz", model, "cpu")
    replay.guess(model, is_perfect=is_perfect)
    replay.show(0, 0, 1)
    wanted = ids[0, 0, 1:] if is_perfect else guesses[0, 0]
    for block, expected in zip(model, wanted, strict=False):  # the last layer has no next one
        scores = block.experts._hotexperts.guess(torch.zeros(1, 4))
        found = scores.argsort(descending=True, stable=True)[0, : len(expected)]
        assert found.tolist() == expected.tolist()
        assert scores.isfinite().sum() == len(expected)
