"""What every predictor must keep, parametrised over the registry and the simulator's own."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hotexperts.errors import UnknownNameError
from hotexperts.predict import PREDICTORS, Hints, Predictor
from hotexperts.predict.base import MOST_LOG_ODDS
from hotexperts.simulate.foretell import SIMULATED

NAMES = (*PREDICTORS.names(), *SIMULATED)
LAYERS, EXPERTS, TOP_K = 3, 7, 2


def made(name: str, ahead: int = 1) -> Predictor:
    kind = SIMULATED.get(name) or PREDICTORS.load(name)
    return kind(LAYERS, EXPERTS, TOP_K, ahead, with_gate=ahead == 1)


def calls(seed: int, num_tokens: int = 30) -> list[tuple[int, list[int], Hints]]:
    """Layer, demand (sometimes none, sometimes a batch's) and hints of each call."""
    draw = random.Random(seed)
    found = []
    for _ in range(num_tokens):
        for layer in range(LAYERS):
            demand = sorted(draw.sample(range(EXPERTS), draw.randint(0, 4)))
            guesses = [draw.sample(range(EXPERTS), 4) for _ in range(draw.randint(0, 2))]
            found.append((layer, demand, Hints(guesses if layer else [[]], demand)))
    return found


def play(predictor: Predictor, seed: int, *, guess_twice: bool = False) -> list[list[float]]:
    found = []
    predictor.begin()
    for layer, demand, hints in calls(seed):
        guess = predictor.guess(layer, hints)
        if guess_twice:
            predictor.guess((layer + 1) % LAYERS, Hints(truth=[0]))
            guess = predictor.guess(layer, hints)
        assert (guess.shape, guess.dtype) == ((EXPERTS,), np.float32)
        assert np.isfinite(guess).all()
        found.append(guess.tolist())
        predictor.observe(layer, demand, hints)
    return found


@pytest.mark.parametrize(
    ("name", "ahead"),
    [(name, ahead) for name in NAMES for ahead in (1, 3) if (name, ahead) != ("gate", 3)],
)
def test_a_guess_is_finite_and_changes_nothing(name: str, ahead: int) -> None:
    once, twice = made(name, ahead), made(name, ahead)
    assert play(once, seed=1) == play(twice, seed=1, guess_twice=True)


@pytest.mark.parametrize("name", NAMES)
def test_reset_equals_a_fresh_predictor(name: str) -> None:
    used, fresh = made(name), made(name)
    play(used, seed=1)
    used.reset()
    assert play(used, seed=2) == play(fresh, seed=2)


@pytest.mark.parametrize("name", NAMES)
def test_what_always_comes_is_expected_more_and_more(name: str) -> None:
    predictor, hints = made(name), Hints([[5, 2, 0, 1]], [2, 5])
    predictor.begin()
    for token in range(40):
        if token == 20:
            predictor.begin()  # a map of requests knows nothing before one has ended
        for layer in range(LAYERS):
            predictor.observe(layer, [2, 5], hints)
    guess = predictor.guess(1, hints)
    assert set(np.argsort(-guess)[:2]) == {2, 5}
    assert guess[2] > 1.0
    assert guess[0] < -1.0


def test_the_oracle_is_sure() -> None:
    guess = made("oracle").guess(0, Hints(truth=[3]))
    assert guess.tolist() == [MOST_LOG_ODDS if e == 3 else -MOST_LOG_ODDS for e in range(EXPERTS)]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="unknown predictor 'psychic': choose one of"):
        PREDICTORS.load("psychic")
