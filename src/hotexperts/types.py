"""Small frozen values that decisions and bytes share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Event:
    """One layer call, as a policy sees it.

    Attributes:
        demand: the distinct experts that it needs, ascending.
        counts: tokens routed to each of them, same order, at least 1.
        resident: experts that hold a slot when it starts.
        evict: False where free slots only are taken (prefill); a shadow cache must know it,
            plain scores need not.
    """

    demand: Sequence[int]
    counts: Sequence[int]
    resident: Collection[int]
    evict: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """What one layer call does to the cache.

    Attributes:
        admitted: missed experts that get a slot, ascending.
        victims: residents that give up theirs, in eviction order; the first
            `len(admitted) - len(victims)` admitted experts take free slots, the others take the
            victims' slots in this order.
        bypassed: missed experts that are served without entering the cache, ascending.
    """

    admitted: tuple[int, ...]
    victims: tuple[int, ...]
    bypassed: tuple[int, ...]


class Placement(NamedTuple):
    """One expert and the slot that is to hold it."""

    expert: int
    slot: int
