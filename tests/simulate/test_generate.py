"""Generated routing: the same for the same seed, and hits as the fit has them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hotexperts.errors import ConfigError, UnknownNameError
from hotexperts.simulate import Trace
from hotexperts.simulate.generate import GENERATORS, TraceSize, generate, phases, zipf
from simulate.models import lru_hits

SIZE = TraceSize(num_sequences=3, num_tokens=40, num_layers=2, num_experts=16, top_k=4)
# What the fit came to with a cold cache for each prompt of 129 tokens: shared ids from one token to
# the next, and LRU's hits in percent by slots (published for the model: 42.4, 64.7, 81.0, 91.8).
FIT_LAG_1, FIT = 0.427, {8: 42.4, 16: 63.6, 32: 81.4, 64: 91.3}


@pytest.mark.parametrize("kind", GENERATORS)
def test_the_seed_decides(kind: str) -> None:
    first, again, other = (np.stack([*generate(kind, SIZE, seed)]) for seed in (1, 1, 2))
    assert first.shape == (3, 40, 2, 4)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[0], first[1])
    flat = first.reshape(120, 2, 4)
    Trace(flat, np.ones(120, int), np.zeros(120, int))  # which refuses an expert twice a token


def test_popularity_follows_the_exponent_and_changes_where_told() -> None:
    size = TraceSize(num_sequences=2, num_tokens=3000, num_layers=1, num_experts=16, top_k=1)
    counts = np.bincount(np.concatenate([*zipf(size, 0, exponent=1.0)]).ravel(), minlength=16)
    expected = 6000 / np.arange(1, 17) / (1 / np.arange(1, 17)).sum()
    assert np.sort(counts)[::-1] == pytest.approx(expected, rel=0.15)
    ids = np.concatenate([*phases(size, 0, exponent=3.0, changes=[1000, 4000])]).ravel()
    parts = [ids[:1000], ids[1000:4000], ids[4000:]]
    favourites = [int(np.bincount(part).argmax()) for part in parts]
    assert len(set(favourites)) == 3
    for part, favourite in zip(parts, favourites, strict=True):
        assert np.mean(part == favourite) > 0.75


def test_the_fitted_one_hits_as_often_as_the_fit() -> None:
    # One draw's rates differ from another's by about a point: the mean of several is compared.
    size = TraceSize(num_sequences=25, num_tokens=129, num_layers=4)
    sequences = [*itertools.chain(*(generate("fitted", size, seed) for seed in range(8)))]
    same = [(s[1:, :, :, None] == s[:-1, :, None, :]).any(axis=3).mean() for s in sequences]
    assert np.mean(same) == pytest.approx(FIT_LAG_1, abs=0.02)
    for slots, expected in FIT.items():
        hits = sum(
            lru_hits([(row, True) for row in sequence[:, layer].tolist()], slots)
            for sequence in sequences[::4]
            for layer in range(size.num_layers)
        )
        demands = sum(sequence.size for sequence in sequences[::4])
        assert 100 * hits / demands == pytest.approx(expected, abs=2), slots


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0: give at least 1"),
        ({"top_k": 17}, "17 experts a token of 16"),
        ({"num_experts": 70_000}, "give at most 65535"),
        ({"num_tokens": 1 << 28}, "draw less"),
    ],
)
def test_sizes_that_mean_nothing(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TraceSize(**{"num_experts": 16, **numbers})


def test_names_and_seeds_that_mean_nothing() -> None:
    with pytest.raises(UnknownNameError, match="choose one of uniform, zipf, phases, fitted"):
        generate("normal", SIZE, 0)
    with pytest.raises(ConfigError, match="seed -1"):
        generate("zipf", SIZE, -1)
