"""What LRU and the best shadow would have hit, beside the cache's own counters."""

from __future__ import annotations

import pytest
import torch

from hotexperts.cache import CachedWeightProvider, CPUBackingStore
from hotexperts.policy import POLICIES
from hotexperts.stats import CacheStats, total

NUM_EXPERTS = 12


def provider(policy: str = "adv", capacity: int = 2) -> CachedWeightProvider:
    store = CPUBackingStore.from_tensors({"w": torch.zeros(NUM_EXPERTS, 4)})
    return CachedWeightProvider(store, capacity, policy=policy)


def serve(cache: CachedWeightProvider, calls: str) -> None:
    """A word a call, a letter an expert: "AB C"."""
    for word in calls.split():
        for _ in cache.waves(torch.tensor([[ord(letter) - ord("A") for letter in word]])):
            pass


def hits(cache: CachedWeightProvider) -> tuple[int, int | None, int | None]:
    stats = cache.stats
    return stats.hits, stats.lru_hits, stats.best_shadow_hits


def test_counted_by_hand() -> None:
    # A and B were used for long: 40 hits for everybody. Then C, D, C: the second C is a hit of LRU
    # and of the shadow that knows recent use alone; the cache itself follows too late.
    cache = provider()
    serve(cache, "AB " * 21 + "C D C")
    assert cache.stats.demands == 45
    assert hits(cache) == (40, 41, 41)
    cache.reset_stats()
    assert hits(cache) == (0, 0, 0)
    serve(cache, "C D E")  # LRU holds C and D
    assert hits(cache)[1:] == (2, 2)
    cache.reset()
    assert hits(cache) == (0, 0, 0)
    serve(cache, "C")
    assert hits(cache) == (0, 0, 0)


def test_a_restored_history_is_not_this_caches_own() -> None:
    old, new = provider(), provider()
    serve(old, "AB " * 21)
    serve(new, "A A A")
    assert hits(new) == (2, 2, 2)
    new.restore(old.state())
    assert hits(new) == (2, 2, 2)
    serve(new, "AB")
    assert hits(new) == (4, 4, 4)


@pytest.mark.parametrize("policy", POLICIES.names())
def test_only_a_policy_with_shadows_has_them(policy: str) -> None:
    cache = provider(policy, 3)
    serve(cache, "ABC AB CD A")  # LRU: A and B, then C; D takes A's slot, which was used with B
    assert (cache.stats.lru_hits is not None) == (policy == "adv")
    assert ("lru_hits" in cache.stats.as_dict()) == (policy == "adv")
    assert total([cache.stats, cache.stats]).lru_hits == (6 if policy == "adv" else None)


def test_totals_leave_out_what_nobody_counts() -> None:
    assert "lru_hits" not in total([CacheStats(hits=1), CacheStats(hits=2)]).as_dict()
    both = total([CacheStats(lru_hits=1, best_shadow_hits=4), CacheStats(lru_hits=2)])
    assert (both.lru_hits, both.best_shadow_hits) == (3, 4)
