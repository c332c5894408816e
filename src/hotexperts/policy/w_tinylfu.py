"""W-TinyLFU: who leaves a small window must be more frequent than the main cache's victim."""

from __future__ import annotations

from collections.abc import Sequence

from hotexperts.policy.base import Policy
from hotexperts.policy.lfu import LFU
from hotexperts.types import Event

WINDOW_SHARE = 100  # one in so many slots is in the window


class WTinyLFU(Policy):
    """Window, gate and segmented main cache (Einziger, Friedman and Manes, ACM ToS 13(4), 2017).

    Newcomers enter an LRU window of a hundredth of the slots, at least one. Whom it displaces
    goes to the main cache, an SLRU: a hit on probation protects, at most 4/5 of main, and what
    overflows goes back on probation. Once all slots are taken the displaced expert must have a
    strictly higher count than main's victim; the loser leaves. Counts are LFU's, for all
    experts, as design/policies.md has it: a sketch would save nothing.

    Our reading for an event: misses pass through the window in ascending id. Displaced are the
    residents of the window, oldest first, then all misses but the last ones that fit. The last
    of the displaced, as many as find no free slot, each meet main's next victim that is neither
    demanded nor displaced in this event. A demanded resident wins in any case. A miss that loses
    passes by. Where fewer may, the first of those enter after all and main's next victims leave,
    then the window's.
    """

    name = "w-tinylfu"

    def reset(self) -> None:
        """Forget every use and empty all segments."""
        super().reset()
        self.uses = LFU(self.num_experts, self.capacity)
        self.max_window = max(1, self.capacity // WINDOW_SHARE)
        self.max_protected = (self.capacity - self.max_window) * 4 // 5
        self.window: dict[int, None] = {}  # oldest first, as the others
        self.probation: dict[int, None] = {}
        self.protected: dict[int, None] = {}
        self.place: dict[int, int] = {}
        self.losers: list[int] = []

    def record(self, event: Event) -> None:
        """Count, hit, and find out who would lose at the gate."""
        self.tick += 1
        self.uses.record(event)
        self._follow(set(event.resident))
        for expert in event.demand:
            if expert in event.resident:
                self._hit(expert)
        victims, self.losers = self._play(event) if event.evict else ([], [])
        order = dict.fromkeys([*victims, *self.probation, *self.protected, *self.window])
        self.place = {expert: place for place, expert in enumerate(order)}

    def eviction_key(self, expert: int) -> int:
        """Losers at the gate in order of their loss, then main's victims."""
        return self.place[expert]

    def admit(
        self,
        misses: Sequence[int],
        candidates: Sequence[int],
        free: int,
        num_demanded: int,
        max_bypassed: int,
    ) -> Sequence[int]:
        """All but those that lost at the gate."""
        num_places = min(len(misses), free + len(candidates))
        winners = [expert for expert in misses if expert not in self.losers]
        num_entering = max(min(len(winners), num_places), num_places - max_bypassed)
        return [*winners, *self.losers][:num_entering]

    def moved(self, admitted: Sequence[int], victims: Sequence[int]) -> None:
        """Through the window, and from there on probation."""
        for expert in victims:
            self._leave(expert)
        for expert in admitted:
            self._enter(expert)

    def _play(self, event: Event) -> tuple[list[int], list[int]]:
        """Victims in order and misses that pass by."""
        misses = [expert for expert in event.demand if expert not in event.resident]
        displaced = [*self.window, *misses]
        displaced = displaced[: max(0, len(displaced) - self.max_window)]
        num_leaving = max(0, len(misses) - (self.capacity - len(event.resident)))
        main = iter([e for e in (*self.probation, *self.protected) if e not in event.demand])
        defender = next(main, None)
        count = self.uses.count
        victims: list[int] = []
        losers: list[int] = []
        for expert in displaced[max(0, len(displaced) - num_leaving) :]:
            stays = expert in event.demand and expert in event.resident
            if defender is not None and (stays or count[expert] > count[defender]):
                victims.append(defender)
                defender = next(main, None)
            elif expert in misses:
                losers.append(expert)
            elif not stays:
                victims.append(expert)
        return victims, losers

    def _hit(self, expert: int) -> None:
        if expert in self.window:
            del self.window[expert]
            self.window[expert] = None
            return
        self._leave(expert)
        self.protected[expert] = None
        if len(self.protected) > self.max_protected:
            oldest = next(iter(self.protected))
            del self.protected[oldest]
            self.probation[oldest] = None

    def _enter(self, expert: int) -> None:
        self.window[expert] = None
        if len(self.window) > self.max_window:
            oldest = next(iter(self.window))
            del self.window[oldest]
            self.probation[oldest] = None

    def _leave(self, expert: int) -> None:
        for segment in (self.window, self.probation, self.protected):
            segment.pop(expert, None)

    def _follow(self, resident: set[int]) -> None:
        """Agree with the ledger, which empties slots whose bytes did not arrive."""
        known = {*self.window, *self.probation, *self.protected}
        for expert in known - resident:
            self._leave(expert)
        for expert in sorted(resident - known):
            self._enter(expert)
