"""Caches that hold no bytes: what another policy would have hit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotexperts.policy.base import Policy


class LRUShadow:
    """The experts that an LRU cache of `capacity` slots would hold, decided as `LRU` decides."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: dict[int, None] = {}  # oldest use first, of one call the lower id

    def use(self, demand: Sequence[int], *, evict: bool) -> int:
        """Play one event and return its hits; the arguments are those of an `Event`."""
        order = self.order
        hits = [expert for expert in demand if expert in order]
        for expert in hits:
            del order[expert]
        free = self.capacity - len(order) - len(hits)
        num_missed = len(demand) - len(hits)
        num_entering = min(num_missed, free + (len(order) if evict else 0))
        for victim in list(order)[: max(0, num_entering - free)]:
            del order[victim]
        if num_entering == num_missed:
            order.update(dict.fromkeys(demand))
            return len(hits)
        entering = [expert for expert in demand if expert not in hits][:num_entering]
        order.update(dict.fromkeys(sorted(hits + entering)))
        return len(hits)


@dataclass(frozen=True, slots=True)
class ShadowHits:
    """What caches of the same size would have hit in the same events.

    Attributes:
        demands: experts demanded, each once an event.
        own: those that were resident in the real cache.
        lru: those that an LRU cache would have held.
        shadows: the same for each shadow, in ADV's order.
    """

    demands: int
    own: int
    lru: int
    shadows: tuple[int, ...]

    @property
    def regret(self) -> int:
        """Hits that the best of the others has more than the real cache; negative: fewer."""
        return max(self.lru, *self.shadows) - self.own

    def __sub__(self, earlier: ShadowHits) -> ShadowHits:
        """What came after `earlier`."""
        shadows = zip(self.shadows, earlier.shadows, strict=True)
        return ShadowHits(
            self.demands - earlier.demands,
            self.own - earlier.own,
            self.lru - earlier.lru,
            tuple(now - then for now, then in shadows),
        )


class ShadowCounter:
    """A policy's shadow hits, counted from when it is asked to, as a cache counts its own hits.

    Args:
        policy: whose; one without shadows counts nothing.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self._start = self._policy.shadow_hits()

    def read(self) -> ShadowHits | None:
        """What was counted; None where the policy has no shadows."""
        now = self._policy.shadow_hits()
        return None if now is None or self._start is None else now - self._start

    def go_on_from(self, counted: ShadowHits | None) -> None:
        """After the policy took over another one's history, whose hits are not this cache's."""
        self.reset()
        if self._start is not None and counted is not None:
            self._start = self._start - counted
