"""SLRU: newcomers are on probation until they are used again."""

from __future__ import annotations

from collections.abc import Sequence

from hotexperts.policy.lru import LRU
from hotexperts.types import Event


class SLRU(LRU):
    """Segmented LRU (Karedla, Love and Wherry, IEEE Computer 27(3), 1994).

    A hit moves an expert into the protected segment, at most 4/5 of the slots; what overflows
    there, oldest first, goes back on probation. Victims come from probation first.
    """

    name = "slru"
    history = ("protected",)

    def reset(self) -> None:
        """Forget every use and empty the protected segment."""
        super().reset()
        self.protected: set[int] = set()
        self.max_protected = self.capacity * 4 // 5

    def record(self, event: Event) -> None:
        """Stamp the demanded experts and protect those that hit."""
        super().record(event)
        self.protected.update(expert for expert in event.demand if expert in event.resident)
        overflow = len(self.protected) - self.max_protected
        if overflow > 0:
            self.protected.difference_update(sorted(self.protected, key=self._age)[:overflow])

    def eviction_key(self, expert: int) -> tuple[bool, int]:
        """Probation before protected, then time of the last use."""
        return expert in self.protected, self.last_use[expert]

    def moved(self, admitted: Sequence[int], victims: Sequence[int]) -> None:
        """Whoever leaves loses its protection."""
        self.protected.difference_update(victims)

    def _age(self, expert: int) -> tuple[int, int]:
        return self.last_use[expert], expert
