"""Learned: a small model, trained as it goes, says who will be used again soon."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hotexperts.policy.auto import Averages
from hotexperts.policy.base import Policy
from hotexperts.types import Event

HORIZON = 8  # events
DECAYS = (0.5, 0.8, 0.9, 0.95, 0.98)
MAX_LOG = 511  # ages and counts beyond it look alike
LOG = np.array([math.log1p(n) / math.log1p(MAX_LOG) for n in range(MAX_LOG + 1)], np.float32)
AGE, COUNT, ONE = range(len(DECAYS), len(DECAYS) + 3)  # rows of the features after the averages
PRIOR = {3: 1.0}  # untrained, it ranks as an average with decay .95
RATE = 0.5
MAX_LOGIT = 30.0


class Learned(Policy):
    """Logistic regression on recency and frequency, the idea of FlashMoE (arXiv 2601.17063).

    FlashMoE trains a feed-forward network for each layer ahead of time. Our reading needs no
    training set and claims nothing about the paper's figures: eight features of every expert,
    all from 0 to 1, are its average use with five decays, the logarithms of the events since its
    last use and of its count of uses, each over log(512) and cut off there, and 1. The chance to
    be used within the next 8 events is `1 / (1 + exp(-z))`, `z = w . x`; the smallest z leaves.

    One expert in 8 has its turn in an event: what its features were at its last turn, 8 events
    ago, is compared with whether it was used since, `w = w - .5 * mean((p - used) * x)` over
    those whose turn it is; then its features are kept for the next turn. No draw is in it, and
    every weight but one starts at 0. float32, but p in double.
    """

    name = "learned"
    history = ("averages.rows", "count", "last_use", "seen", "weight")
    times = ("last_use",)
    counts = ("count",)
    amounts = ("averages.rows", "seen")

    def reset(self) -> None:
        """Forget every use and what was learned."""
        super().reset()
        self.averages = Averages(DECAYS, self.num_experts)
        self.count = np.zeros(self.num_experts, np.int32)
        self.last_use = np.full(self.num_experts, -1, np.int32)
        self.seen = np.zeros((ONE + 1, self.num_experts), np.float32)
        self.weight = np.zeros((ONE + 1, 1), np.float32)
        for row, weight in PRIOR.items():
            self.weight[row] = weight
        self.score = np.zeros(self.num_experts, np.float32)

    def record(self, event: Event) -> None:
        """Note the uses, learn from whose turn it is, then score all."""
        used = list(event.demand)
        use = np.zeros(self.num_experts, np.float32)
        use[used] = 1
        self.averages.add(use)
        self.count[used] += 1
        self.last_use[used] = self.tick
        features = self._features()
        turn = slice(self.tick % HORIZON, None, HORIZON)
        if self.tick >= HORIZON and turn.start < self.num_experts:
            self._learn(self.seen[:, turn], self.last_use[turn] > self.tick - HORIZON)
        self.seen[:, turn] = features[:, turn]
        self.score = np.add.reduce(self.weight * features)
        self.tick += 1

    def eviction_key(self, expert: int) -> float:
        """How likely it is to be used soon, as z."""
        return self.score.item(expert)

    def _features(self) -> npt.NDArray[np.float32]:
        """Rows as DECAYS has them, then AGE, COUNT and ONE."""
        features = np.empty_like(self.seen)
        features[:AGE] = self.averages.rows
        features[AGE] = LOG[np.minimum(self.tick - self.last_use, MAX_LOG)]
        features[COUNT] = LOG[np.minimum(self.count, MAX_LOG)]
        features[ONE] = 1
        return features

    def _learn(self, features: npt.NDArray[np.float32], was_used: npt.NDArray[np.bool_]) -> None:
        """One step down the gradient of the log loss."""
        logits = np.add.reduce(self.weight * features).clip(-MAX_LOGIT, MAX_LOGIT).tolist()
        chance = np.array([1 / (1 + math.exp(-logit)) for logit in logits])
        gradient = np.add.reduce((chance - was_used) * features, axis=1) / len(logits)
        self.weight -= (RATE * gradient[:, None]).astype(np.float32)
