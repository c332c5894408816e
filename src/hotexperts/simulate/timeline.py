"""When things happen in a replay with prefetch: one link, and layers that compute."""

from __future__ import annotations

from collections.abc import Collection

from hotexperts.simulate.cost import Cost


class Timeline:
    """A clock of decode, in milliseconds; of one call in the order of the methods.

    Args:
        cost: the link, what layers compute, and which part of that is the experts'.
        nbytes: of an expert.
        at_output: guesses are made after the experts of a layer, not before.

    Attributes:
        now: the time.
        free_at: when the link has carried all that it was asked for.
    """

    def __init__(self, cost: Cost, nbytes: int, *, at_output: bool) -> None:
        self.copy_ms = nbytes / (cost.link_gb_s * 1e6)
        self.experts_ms = cost.compute_ms * cost.moe_share
        self.before_ms = cost.compute_ms - self.experts_ms
        self.idle_ms = self.before_ms if at_output else cost.compute_ms
        self.now = self.free_at = 0.0

    def reach_router(self) -> None:
        """Compute what comes before the experts."""
        self.now += self.before_ms

    def num_late(self, arrivals: Collection[float]) -> int:
        """Transfers that have not ended now. Changes nothing."""
        return sum(arrival > self.now for arrival in arrivals)

    def fetch(self, arrivals: Collection[float], num_experts: int) -> None:
        """Wait for the call's guesses, then for the experts that are still missing."""
        self.now = max([self.now, *arrivals])
        if num_experts:
            self.now = self.free_at = max(self.free_at, self.now) + num_experts * self.copy_ms

    def compute_experts(self) -> None:
        """Compute the experts."""
        self.now += self.experts_ms

    def hidden(self, num_transfers: int) -> list[float]:
        """Of each transfer asked for now, the part that is over when the next layer may fetch.

        However far ahead that call is: a longer look-ahead leaves the link idle no longer, and a
        transfer that is not over by then is in the way of the misses in between.
        """
        left_ms = self.idle_ms - max(0.0, self.free_at - self.now)
        return [
            min(max((left_ms - place * self.copy_ms) / self.copy_ms, 0.0), 1.0)
            for place in range(num_transfers)
        ]

    def transfer(self) -> float:
        """Ask for one expert more: when it arrives."""
        self.free_at = max(self.free_at, self.now) + self.copy_ms
        return self.free_at
