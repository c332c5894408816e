"""SIEVE: a hand sweeps from old to new and evicts what was not used since it last passed."""

from __future__ import annotations

from hotexperts.policy.serial import Serial


class SIEVE(Serial):
    """SIEVE (Zhang, Yang, Yue, Vigfusson and Rashmi, NSDI 2024).

    A queue in order of entry and one bit an expert, set by a hit, clear at entry. The hand clears
    the bits that it passes, evicts the first expert whose bit is clear and stops at the next
    younger one; past the youngest it begins at the oldest again.

    Our reading for an event: see `Serial`. The hand passes a demanded expert as one whose bit is
    set. As newcomers enter after all victims have left, a hand that went past the youngest starts
    the next event at the oldest, not at them.
    """

    name = "sieve"
    history = ("visited", "hand")
    queues = ("visited",)

    def reset(self) -> None:
        """Forget every expert."""
        super().reset()
        self.visited: dict[int, bool] = {}  # oldest entry first
        self.hand: int | None = None  # None: the oldest

    def check_history(self) -> None:
        """The hand is at somebody."""
        super().check_history()
        if self.hand is not None and self.hand not in self.visited:
            raise ValueError(f"hand is damaged (at {self.hand!r:.40}, who is not resident)")

    def hit(self, expert: int) -> None:
        """Set its bit."""
        self.visited[expert] = True

    def evict(self, newcomer: int) -> int | None:
        """Sweep; after one round all bits are clear, so two suffice."""
        queue = list(self.visited)
        start = 0 if self.hand is None else queue.index(self.hand)
        for expert in (queue[start:] + queue[:start]) * 2:
            if not self.visited[expert] and expert not in self.demanded:
                self.hand = expert
                self.leave(expert)
                return expert
            self.visited[expert] = False
        return None

    def enter(self, expert: int) -> None:
        """Join as the youngest."""
        self.visited[expert] = False

    def leave(self, expert: int) -> None:
        """Step out of the queue; a hand that points there moves on."""
        if self.hand == expert:
            queue = list(self.visited)
            self.hand = next(iter(queue[queue.index(expert) + 1 :]), None)
        del self.visited[expert]
