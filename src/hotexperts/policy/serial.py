"""Policies that their source states one access at a time, carried over to layer calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import ClassVar, TypeVar

from hotexperts.policy.base import Policy
from hotexperts.types import Event

V = TypeVar("V")


class Serial(Policy):
    """A policy with queues, which are changed one access at a time.

    Our reading, the same for all of them: the demanded experts hit or miss in ascending id; then
    all victims leave, one after another as the source evicts, demanded experts being skipped;
    then the newcomers enter in ascending id. The i-th victim makes room for the i-th newcomer
    that finds no free slot. Every miss enters while there is a victim.

    Attributes:
        queues: sets or dicts, of which each resident is in one.
    """

    history: ClassVar[tuple[str, ...]] = ("known",)
    queues: ClassVar[tuple[str, ...]]

    def reset(self) -> None:
        """Forget every expert."""
        super().reset()
        self.known: set[int] = set()
        self.demanded: frozenset[int] = frozenset()
        self.plan: dict[int, int] = {}

    def check_history(self) -> None:
        """Whoever is resident is in one queue, and nobody else."""
        held = sorted(expert for name in self.queues for expert in getattr(self, name))
        if held != sorted(self.known) or len(held) > self.capacity:
            names = ", ".join(self.queues)
            raise ValueError(f"{names} are damaged (they do not hold who is known as resident)")

    def record(self, event: Event) -> None:
        """Hit and miss, then find out on a copy who would leave."""
        self.tick += 1
        self.demanded = frozenset(event.demand)
        self._follow(set(event.resident))
        misses = []
        for expert in event.demand:
            if expert in self.known:
                self.hit(expert)
            else:
                self.miss(expert)
                misses.append(expert)
        newcomers = misses[max(0, self.capacity - len(self.known)) :]
        self.plan = self._twin()._evictions(newcomers) if event.evict and newcomers else {}

    def eviction_key(self, expert: int) -> int:
        """Place among those that would leave; all others come after them."""
        return self.plan.get(expert, len(self.plan))

    def moved(self, admitted: Sequence[int], victims: Sequence[int]) -> None:
        """Carry the plan out."""
        newcomers = admitted[len(admitted) - len(victims) :]
        gone = list(self._evictions(newcomers))
        assert gone == list(victims), (gone, victims)
        self.known.difference_update(victims)
        for expert in admitted:
            self.enter(expert)
        self.known.update(admitted)

    @abstractmethod
    def hit(self, expert: int) -> None:
        """A resident is used."""

    def miss(self, expert: int) -> None:
        """An expert that is not resident is used; it may enter later in the event."""

    @abstractmethod
    def evict(self, newcomer: int) -> int | None:
        """Remove and return the resident that makes room for `newcomer`; None if all are needed."""

    @abstractmethod
    def enter(self, expert: int) -> None:
        """A missed expert takes a slot."""

    @abstractmethod
    def leave(self, expert: int) -> None:
        """A resident lost its slot by no decision of ours: no trace of it stays."""

    def oldest(self, queue: dict[int, V]) -> int | None:
        """First of a queue that may leave."""
        return next((expert for expert in queue if expert not in self.demanded), None)

    def _twin(self) -> Serial:
        """A copy whose queues are its own; what `evict` does not change is shared."""
        twin = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict | set):
                setattr(twin, name, value.copy())
        return twin

    def _follow(self, resident: set[int]) -> None:
        """Agree with the ledger, which empties slots whose bytes did not arrive."""
        for expert in sorted(self.known - resident):
            self.leave(expert)
        for expert in sorted(resident - self.known):
            self.enter(expert)
        self.known = resident

    def _evictions(self, newcomers: Sequence[int]) -> dict[int, int]:
        """Evict for each newcomer; who left, with its place."""
        gone: dict[int, int] = {}
        for newcomer in newcomers:
            victim = self.evict(newcomer)
            if victim is None:
                break
            gone[victim] = len(gone)
        return gone


def trim(ghosts: dict[int, None], size: int) -> None:
    """Drop the oldest ghosts over `size`."""
    while len(ghosts) > max(0, size):
        del ghosts[next(iter(ghosts))]
