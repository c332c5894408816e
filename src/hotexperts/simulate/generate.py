"""Routing drawn by a generator: for long runs and batches, where nothing was recorded.

Every generator yields sequence after sequence, `[token, layer, k]`, the best expert first, and the
same ones for the same seed and size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotexperts.errors import ConfigError, UnknownNameError
from hotexperts.simulate.trace import MAX_CELLS, MAX_EXPERT, Ints

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TraceSize:
    """How much to draw.

    Attributes:
        num_sequences: sequences, which share what a generator draws once for each layer.
        num_tokens: of each sequence.
        num_layers: layers.
        num_experts: in each layer.
        top_k: distinct experts that a token asks for in each layer.

    Raises:
        ConfigError: a number below 1, more experts a token than there are, or too large a trace.
    """

    num_sequences: int = 48
    num_tokens: int = 300
    num_layers: int = 8
    num_experts: int = 128
    top_k: int = 8

    def __post_init__(self) -> None:
        for name, number in asdict(self).items():
            if number < 1:
                raise ConfigError(f"{name} is {number}: give at least 1")
        if self.num_experts > MAX_EXPERT + 1:
            raise ConfigError(f"{self.num_experts} experts: give at most {MAX_EXPERT + 1}")
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"{self.top_k} experts a token of {self.num_experts}: give fewer, or more experts"
            )
        if self.num_sequences * self.num_tokens * self.num_layers * self.top_k > MAX_CELLS:
            raise ConfigError(f"the trace would hold more than {MAX_CELLS} ids: draw less")


def uniform(size: TraceSize, seed: int) -> Iterator[Ints]:
    """Every expert as likely as any other: what no policy can do anything about."""
    return zipf(size, seed, exponent=0.0)


def zipf(size: TraceSize, seed: int, *, exponent: float = 1.0) -> Iterator[Ints]:
    """Experts drawn in proportion to rank^-exponent; every layer ranks them in its own way.

    Tokens are independent of each other.
    """
    return phases(size, seed, exponent=exponent, changes=())


def phases(
    size: TraceSize, seed: int, *, exponent: float = 1.0, changes: Sequence[int] | None = None
) -> Iterator[Ints]:
    """As `zipf`, but the ranks are drawn anew at the tokens of `changes`.

    Args:
        size: how much to draw.
        seed: of the draws.
        exponent: of the popularity.
        changes: tokens counted over the whole trace; None takes a quarter, half and three quarters.
    """
    total = size.num_sequences * size.num_tokens
    starts = np.sort([total * n // 4 for n in (1, 2, 3)] if changes is None else [*changes])
    rng = np.random.default_rng(seed)
    weight = -exponent * np.log(np.arange(1, size.num_experts + 1))
    shape = (len(starts) + 1, size.num_layers, size.num_experts)
    popularity = rng.permuted(np.broadcast_to(weight, shape), axis=2)
    for sequence in range(size.num_sequences):
        tokens = np.arange(size.num_tokens) + sequence * size.num_tokens
        phase = np.searchsorted(starts, tokens, side="right")
        ids = [
            # the k largest of log weight + Gumbel noise are k draws without replacement
            _top_k(log[phase] + rng.gumbel(size=(len(tokens), size.num_experts)), size.top_k)
            for log in popularity.swapaxes(0, 1)
        ]
        yield np.stack(ids, axis=1)


class Fitted(NamedTuple):
    """Constants of the fitted generator: scales of its parts, then what the parts are drawn from.

    Attributes:
        bias: of an expert's own popularity.
        topic: of what a sequence is about.
        drift: of a state that moves slowly from token to token.
        word: of the token itself.
        wave: of a state that moves fast.
        noise: of what nothing explains.
        drift_memory: correlation of the slow state from one token to the next.
        wave_memory: the same of the fast one.
        dim: of topics, states and words.
        num_words: the vocabulary.
        zipf: exponent of the words' frequency.
        num_own_words: what a sequence draws from by preference.
        own_share: how often it does.
        layer_memory: correlation of a layer's weights with the layer before, squared.
    """

    bias: float = 0.53
    topic: float = 1.28
    drift: float = 0.93
    word: float = 0.90
    wave: float = 0.69
    noise: float = 0.18
    drift_memory: float = 0.90
    wave_memory: float = 0.37
    dim: int = 48
    num_words: int = 3000
    zipf: float = 1.05
    num_own_words: int = 120
    own_share: float = 0.46
    layer_memory: float = 0.85


def fitted(size: TraceSize, seed: int) -> Iterator[Ints]:
    """Popular, topical, recurring and drifting experts, as in Qwen3-30B-A3B.

    The constants are fitted, at 128 experts and 8 a token, to hit rates published for that model
    with a cold cache for each prompt of 129 tokens. It is good for comparing what leaves a cache,
    also in batches; not for prefetch from layer to layer, nor for anything that reads logits.
    """
    by, rng = Fitted(), np.random.default_rng(seed)
    frequency = np.arange(1, by.num_words + 1, dtype=np.float64) ** -by.zipf
    frequency /= frequency.sum()
    words = rng.standard_normal((by.num_words, by.dim))
    layers = _layers(by, size, rng)
    scales = (by.topic, by.drift, by.word, by.wave)
    for _ in range(size.num_sequences):
        parts = _parts(by, size.num_tokens, frequency, words, rng)
        state = np.concatenate([s * part for s, part in zip(scales, parts, strict=True)], axis=1)
        ids = []
        for weights, names in layers:
            noise = by.noise * rng.standard_normal((size.num_tokens, size.num_experts))
            logits = by.bias * weights[:, -1] + state @ weights[:, :-1].T + noise
            ids.append(names[_top_k(logits, size.top_k)])
        yield np.stack(ids, axis=1)


def _layers(by: Fitted, size: TraceSize, rng: np.random.Generator) -> list[tuple[Floats, Ints]]:
    """Of each layer the weights `[E, 4 dim + 1]`, the bias last, and the names of its experts."""
    scale = np.full(4 * by.dim + 1, by.dim**-0.5)
    scale[-1] = 1.0
    layers: list[tuple[Floats, Ints]] = []
    for layer in range(size.num_layers):
        weights = scale * rng.standard_normal((size.num_experts, len(scale)))
        if layer:
            old, new = by.layer_memory**0.5, (1 - by.layer_memory) ** 0.5
            weights = old * layers[-1][0] + new * weights
        layers.append((weights, rng.permutation(size.num_experts).astype(np.int32)))
    return layers


def _parts(
    by: Fitted, num_tokens: int, frequency: Floats, words: Floats, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats, Floats]:
    """One sequence's topic, drift, words and wave, `[token, dim]` each, all of variance 1."""
    topic = np.tile(rng.standard_normal(by.dim), (num_tokens, 1))
    own = rng.choice(by.num_words, by.num_own_words, replace=False, p=frequency)
    own_frequency = frequency[own] / frequency[own].sum()
    said = np.where(
        rng.random(num_tokens) < by.own_share,
        rng.choice(own, num_tokens, p=own_frequency),
        rng.choice(by.num_words, num_tokens, p=frequency),
    )
    drift, wave = (_walk(rng, num_tokens, by.dim, m) for m in (by.drift_memory, by.wave_memory))
    return topic, drift, words[said], wave


def _walk(rng: np.random.Generator, num_tokens: int, dim: int, memory: float) -> Floats:
    """An autoregressive state of variance 1, `[token, dim]`."""
    state = rng.standard_normal((num_tokens, dim))
    for token in range(1, num_tokens):
        state[token] = memory * state[token - 1] + (1 - memory**2) ** 0.5 * state[token]
    return state


def _top_k(scores: Floats, top_k: int) -> Ints:
    """The k highest of each row, `[token, k]`, the highest first."""
    return np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)


GENERATORS: dict[str, Callable[..., Iterator[Ints]]] = {
    "uniform": uniform,
    "zipf": zipf,
    "phases": phases,
    "fitted": fitted,
}


def generate(kind: str, size: TraceSize, seed: int) -> Iterator[Ints]:
    """The sequences of the generator of that name.

    Raises:
        UnknownNameError: there is none.
        ConfigError: a seed below 0.
    """
    if kind not in GENERATORS:
        raise UnknownNameError(f"generator {kind!r}: choose one of {', '.join(GENERATORS)}")
    if seed < 0:
        raise ConfigError(f"seed {seed}: give 0 or more")
    return GENERATORS[kind](size, seed)


def synthetic_meta(kind: str, size: TraceSize, seed: int) -> dict[str, Any]:
    """What a trace file says about where it comes from."""
    return {
        "model": f"synthetic: {kind}, no real model",
        "n_experts": size.num_experts,
        "k": size.top_k,
        "source": f"hotexperts.simulate.generate, {kind}, seed {seed}",
        "licence": "none needed: drawn at random",
    }
