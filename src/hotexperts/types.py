"""Small frozen values that decisions and bytes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
