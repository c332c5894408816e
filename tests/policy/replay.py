"""A policy and a ledger together, written in letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotexperts.policy import POLICIES
from hotexperts.residency import Residency
from hotexperts.types import Decision


class Replay:
    """One layer under a policy; experts are letters, a letter twice is two tokens, - is nobody."""

    def __init__(self, policy: str, capacity: int, num_experts: int = 8, **options: float) -> None:
        self.policy: Any = POLICIES.load(policy)(num_experts, capacity, **options)
        self.ledger = Residency(num_experts, capacity)

    def decide(self, letters: str, **options: Any) -> Decision:
        demand = sorted({ord(letter) - ord("A") for letter in letters if letter != "-"})
        counts = [letters.count(chr(expert + ord("A"))) for expert in demand]
        decision = self.policy.decide(
            demand, counts, self.ledger.residents, self.ledger.num_free, **options
        )
        self.ledger.apply(decision)
        return decision

    def call(self, letters: str, **options: Any) -> str:
        """In, out and past: `+` admitted, `-` victims in order, `~` bypassed."""
        found = self.decide(letters, **options)
        parts = zip("+-~", (found.admitted, found.victims, found.bypassed), strict=True)
        return " ".join(sign + _spell(experts) for sign, experts in parts if experts)

    def calls(self, words: str) -> str:
        """The victims of each call, . where there is none."""
        return " ".join(_spell(self.decide(word).victims) or "." for word in words.split())

    def residents(self) -> str:
        return _spell(sorted(self.ledger.residents))

    def score(self, letter: str) -> float:
        return float(self.policy.eviction_key(ord(letter) - ord("A")))


def _spell(experts: Sequence[int]) -> str:
    return "".join(chr(expert + ord("A")) for expert in experts)
