"""ARC: two LRU lists, once used and more often used; their ghosts shift the balance."""

from __future__ import annotations

from hotexperts.policy.serial import Serial, trim


class ARC(Serial):
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003).

    `once` and `again` are the paper's T1 and T2, `once_ghosts` and `again_ghosts` its B1 and B2,
    `target` its p. A miss that is a ghost moves the target by `max(1, other / own)` ghosts. The
    oldest of T1 leaves while T1 is longer than the target, or as long and the newcomer in B2;
    otherwise the oldest of T2. T1 and B1 together have at most `capacity` experts, all four lists
    twice as many.

    Our reading for an event: see `Serial`. All ghosts that are demanded move the target, in
    ascending id, before the first victim is chosen, whether they then enter or not; a list
    in which everybody is demanded gives way to the other one; ghosts are trimmed as each newcomer
    enters, which for one miss an event is what the paper does.
    """

    name = "arc"
    history = ("once", "again", "once_ghosts", "again_ghosts", "target")
    amounts = ("target",)
    queues = ("once", "again")

    def reset(self) -> None:
        """Empty all lists."""
        super().reset()
        self.once: dict[int, None] = {}  # oldest first, as the others
        self.again: dict[int, None] = {}
        self.once_ghosts: dict[int, None] = {}
        self.again_ghosts: dict[int, None] = {}
        self.target = 0.0

    def hit(self, expert: int) -> None:
        """It was used again."""
        self.leave(expert)
        self.again[expert] = None

    def miss(self, expert: int) -> None:
        """A ghost tells which list was too short."""
        num_once, num_again = len(self.once_ghosts), len(self.again_ghosts)
        if expert in self.once_ghosts:
            self.target = min(self.capacity, self.target + max(1.0, num_again / num_once))
        elif expert in self.again_ghosts:
            self.target = max(0.0, self.target - max(1.0, num_once / num_again))

    def evict(self, newcomer: int) -> int | None:
        """The paper's REPLACE."""
        lists = [(self.again, self.again_ghosts), (self.once, self.once_ghosts)]
        num_once = len(self.once)
        if num_once > self.target or (num_once == self.target and newcomer in self.again_ghosts):
            lists.reverse()
        for residents, ghosts in lists:
            victim = self.oldest(residents)
            if victim is not None:
                del residents[victim]
                ghosts[victim] = None
                return victim
        return None

    def enter(self, expert: int) -> None:
        """A ghost was used again; others were used once."""
        if expert in self.once_ghosts or expert in self.again_ghosts:
            self.once_ghosts.pop(expert, None)
            self.again_ghosts.pop(expert, None)
            self.again[expert] = None
        else:
            self.once[expert] = None
        trim(self.once_ghosts, self.capacity - len(self.once))
        others = len(self.once) + len(self.again) + len(self.once_ghosts)
        trim(self.again_ghosts, 2 * self.capacity - others)

    def leave(self, expert: int) -> None:
        """Step out of either list."""
        self.once.pop(expert, None)
        self.again.pop(expert, None)
