"""LIRS: what is used again soon stays; the others share a tenth of the slots."""

from __future__ import annotations

from hotexperts.policy.serial import Serial

HIR_SHARE = 10  # one in so many slots is for experts of high inter-reference recency


class LIRS(Serial):
    """Low inter-reference recency set (Jiang and Zhang, SIGMETRICS 2002).

    `stack` is the paper's S, `queue` its Q, `lir` the LIR experts, all of which are resident; HIR
    experts have a tenth of the slots, at least one: the paper's hundredth, of thousands of
    blocks, would be one slot in nearly any layer. An expert that is used while it is HIR and in
    the stack becomes LIR; if there are too many, the LIR expert at the stack's bottom goes to the
    end of the queue and out of the stack. The bottom is always LIR: what is below is dropped. The
    front of the queue leaves, and stays in the stack if it is there.

    Our reading for an event: see `Serial`. A call of many misses empties the queue. Then the
    LIR expert nearest the bottom leaves that is not demanded, out of the stack as if demoted; and
    as in a cold start newcomers become LIR while there are too few of these. The stack keeps
    whoever left for as long as the rule does: it is bounded by the number of experts.
    """

    name = "lirs"
    history = ("stack", "queue", "lir")
    queues = ("queue", "lir")

    def reset(self) -> None:
        """Empty stack and queue."""
        super().reset()
        self.max_lir = self.capacity - max(1, self.capacity // HIR_SHARE)
        self.stack: dict[int, None] = {}  # bottom first
        self.queue: dict[int, None] = {}  # front first
        self.lir: set[int] = set()

    def check_history(self) -> None:
        """LIR experts are in the stack, one of them at its bottom, and not too many."""
        super().check_history()
        bottom = next(iter(self.stack), None)
        is_whole = self.lir <= self.stack.keys() and (bottom is None or bottom in self.lir)
        if not is_whole or len(self.lir) > self.max_lir:
            raise ValueError("stack and lir are damaged (they are not of one cache)")

    def hit(self, expert: int) -> None:
        """Up the stack; HIR in the stack becomes LIR."""
        if expert in self.stack:
            self._make_lir(expert)
        else:
            self._make_hir(expert)

    def evict(self, newcomer: int) -> int | None:
        """The front of the queue, or else the bottom of the stack."""
        victim = self.oldest(self.queue)
        if victim is not None:
            del self.queue[victim]
            return victim
        lir = {expert: None for expert in self.stack if expert in self.lir}
        victim = self.oldest(lir)
        if victim is not None:
            self.leave(victim)
        return victim

    def enter(self, expert: int) -> None:
        """LIR if it is still in the stack or LIR experts are too few."""
        if expert in self.stack or len(self.lir) < self.max_lir:
            self._make_lir(expert)
        else:
            self._make_hir(expert)

    def leave(self, expert: int) -> None:
        """Out of everything."""
        self.stack.pop(expert, None)
        self.queue.pop(expert, None)
        self.lir.discard(expert)
        self._prune()

    def _make_lir(self, expert: int) -> None:
        self.queue.pop(expert, None)
        self.lir.add(expert)
        self._to_top(expert)
        self._prune()
        if len(self.lir) > self.max_lir:
            bottom = next(iter(self.stack))
            self.leave(bottom)
            self.queue[bottom] = None

    def _make_hir(self, expert: int) -> None:
        self.queue.pop(expert, None)
        self.queue[expert] = None
        self._to_top(expert)
        self._prune()

    def _to_top(self, expert: int) -> None:
        self.stack.pop(expert, None)
        self.stack[expert] = None

    def _prune(self) -> None:
        while self.stack and (bottom := next(iter(self.stack))) not in self.lir:
            del self.stack[bottom]
