"""W-TinyLFU: who leaves a small window must be more frequent than the main cache's victim."""

from __future__ import annotations

from hotexperts.policy.lfu import LFU
from hotexperts.policy.serial import Serial
from hotexperts.types import Event

WINDOW_SHARE = 100  # one in so many slots is in the window


class WTinyLFU(Serial):
    """Window, gate and segmented main cache (Einziger, Friedman and Manes, ACM ToS 13(4), 2017).

    Newcomers enter an LRU window of a hundredth of the slots, at least one. Whom one displaces
    there must have a strictly higher count than main's victim to take its place; the loser
    leaves. Main is an SLRU: a hit on probation protects, at most 4/5 of main, and what overflows
    goes back on probation. Counts are those of `LFU`, for all experts: a sketch would save
    nothing.

    Our reading for an event: see `Serial`; all uses are counted first. Each newcomer that finds
    no free slot displaces the window's oldest expert. Demanded ones win at the gate in any case,
    as they are no victims: a displaced resident, and the newcomers that displace one another when
    the window is empty. So every miss enters while there is a victim.
    """

    name = "w-tinylfu"
    history = (
        "uses.count",
        "uses.uses_since_halving",
        "window",
        "probation",
        "protected",
    )
    amounts = ("uses.count", "uses.uses_since_halving")
    queues = ("window", "probation", "protected")

    def reset(self) -> None:
        """Forget every use and empty all segments."""
        super().reset()
        self.uses = LFU(self.num_experts, self.capacity)
        self.max_window = max(1, self.capacity // WINDOW_SHARE)
        self.max_protected = (self.capacity - self.max_window) * 4 // 5
        self.window: dict[int, None] = {}  # oldest first, as the others
        self.probation: dict[int, None] = {}
        self.protected: dict[int, None] = {}

    def record(self, event: Event) -> None:
        """Count the uses, then play the event."""
        self.uses.record(event)
        super().record(event)

    def hit(self, expert: int) -> None:
        """Up in the window, or into the protected segment."""
        if expert in self.window:
            del self.window[expert]
            self.window[expert] = None
            return
        self.leave(expert)
        self.protected[expert] = None
        if len(self.protected) > self.max_protected:
            _move_oldest(self.protected, self.probation)

    def evict(self, newcomer: int) -> int | None:
        """The loser at the gate: whom the window gives up, or main's victim."""
        displaced = next(iter(self.window), None)
        victim = self.oldest(self.probation)
        if victim is None:
            victim = self.oldest(self.protected)
        if displaced is not None:
            if displaced not in self.demanded and not self._beats(displaced, victim):
                victim = displaced
            elif victim is None:
                victim = self.oldest(self.window)
            else:
                _move_oldest(self.window, self.probation)
        if victim is not None:
            self.leave(victim)
        return victim

    def enter(self, expert: int) -> None:
        """Into the window; what overflows there goes on probation."""
        self.window[expert] = None
        if len(self.window) > self.max_window:
            _move_oldest(self.window, self.probation)

    def leave(self, expert: int) -> None:
        """Step out of all segments."""
        for segment in (self.window, self.probation, self.protected):
            segment.pop(expert, None)

    def _beats(self, displaced: int, defender: int | None) -> bool:
        return defender is not None and self.uses.count[displaced] > self.uses.count[defender]


def _move_oldest(source: dict[int, None], target: dict[int, None]) -> None:
    oldest = next(iter(source))
    del source[oldest]
    target[oldest] = None
