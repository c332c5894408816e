"""How many demanded experts were guessed, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hotexperts.simulate.guesses import count_guessed

IDS = np.array([[[7, 8], [1, 2], [3, -1]], [[7, 8], [4, 5], [6, 0]]])
GUESSES = np.array(
    [
        [[2, 9, 1], [5, 3, -1], [-1, -1, -1]],  # 2, then also 1; 3 comes second
        [[9, 1, 2], [0, 6, 5], [-1, -1, -1]],  # none; 0, then also 6
    ]
)


@pytest.mark.parametrize(("num_guesses", "found"), [(1, 2), (2, 4), (3, 5)])
def test_guesses_count_for_the_next_layer(num_guesses: int, found: int) -> None:
    assert count_guessed(IDS, GUESSES, num_guesses) == (found, 7)


def test_the_first_layer_is_nobodys_guess() -> None:
    assert count_guessed(IDS[:, :1], GUESSES[:, :1], 3) == (0, 0)
