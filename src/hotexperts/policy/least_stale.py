"""Least-Stale: what this forward pass did not touch leaves first, then the oldest use."""

from __future__ import annotations

from hotexperts.policy.lru import LRU


class LeastStale(LRU):
    """Least-Stale (SpecMD, arXiv 2602.03921).

    The rule tells layers of the current pass from those of earlier ones, in one pool for all
    layers. Here a pool is one layer's: whatever the pass touched there is in the demand, no
    victim in any case, and what remains is LRU exactly (as arXiv 2608.07911 finds). It has a name
    so that comparisons can show this.
    """

    name = "least-stale"
