"""S3-FIFO: newcomers must be used twice in a small queue to reach the main one."""

from __future__ import annotations

from hotexperts.policy.serial import Serial, trim

MAX_FREQ = 3  # two bits
SMALL_SHARE = 10  # one in so many slots is in the small queue


class S3FIFO(Serial):
    """Small, main and ghost FIFO queues (Yang, Zhang, Qiu, Yue and Rashmi, SOSP 2023).

    The small queue's share is a tenth of the slots, at least one; the ghost queue has as many
    places as there are other slots. A hit counts, up to 3. While the small queue has its share,
    its oldest expert leaves and becomes a ghost, or, if used more than once, goes to main with
    its count cleared; otherwise main's oldest leaves, or goes to its end with one use less.
    Newcomers enter the small queue, ghosts enter main.

    Our reading for an event: see `Serial`; a demanded expert keeps its place in the queue. A move
    that takes main over its share makes the victim main's, so that one call evicts one expert.
    A queue in which everybody is demanded gives way to the other one.
    """

    name = "s3-fifo"
    history = ("small", "main", "ghosts")
    queues = ("small", "main")

    def reset(self) -> None:
        """Empty all queues."""
        super().reset()
        self.max_small = max(1, self.capacity // SMALL_SHARE)
        self.max_main = self.capacity - self.max_small
        self.small: dict[int, int] = {}  # expert to count, oldest first
        self.main: dict[int, int] = {}
        self.ghosts: dict[int, None] = {}

    def check_history(self) -> None:
        """Counts have two bits."""
        super().check_history()
        for count in (*self.small.values(), *self.main.values()):
            if not isinstance(count, int) or not 0 <= count <= MAX_FREQ:
                raise ValueError(f"small or main is damaged (a count of {count!r:.40})")

    def hit(self, expert: int) -> None:
        """Count the use."""
        queue = self.small if expert in self.small else self.main
        queue[expert] = min(queue[expert] + 1, MAX_FREQ)

    def evict(self, newcomer: int) -> int | None:
        """The small queue first while it has its share."""
        if len(self.small) >= self.max_small:
            victim = self._evict_small()
            return self._evict_main() if victim is None else victim
        victim = self._evict_main()
        if victim is None:
            victim = self._evict_small()
        return self._evict_main() if victim is None else victim  # whom the small queue moved there

    def enter(self, expert: int) -> None:
        """Join main where it still is a ghost, otherwise the small queue."""
        if expert in self.ghosts:
            del self.ghosts[expert]
            self.main[expert] = 0
        else:
            self.small[expert] = 0

    def leave(self, expert: int) -> None:
        """Step out of either queue."""
        self.small.pop(expert, None)
        self.main.pop(expert, None)

    def _evict_small(self) -> int | None:
        while (expert := self.oldest(self.small)) is not None:
            if self.small.pop(expert) <= 1:
                self.ghosts[expert] = None
                trim(self.ghosts, self.max_main)
                return expert
            self.main[expert] = 0
            if len(self.main) > self.max_main:
                return self._evict_main()
        return None

    def _evict_main(self) -> int | None:
        while (expert := self.oldest(self.main)) is not None:
            count = self.main.pop(expert)
            if count == 0:
                return expert
            self.main[expert] = count - 1
        return None
