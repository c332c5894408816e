"""Who enters and who leaves, as device code: the same for a real cache and for a shadow one."""

# ruff: noqa: N803 (kernel constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

LAST_KEY: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)
CHUNK: tl.constexpr = tl.constexpr(32)


@triton.jit
def rank(keys_at, keys, counted, o_e, m_e, NUM_EXPERTS: tl.constexpr):
    """How many counted experts come before each one, by key and then id.

    Keys go through memory so that the comparison runs in chunks; every program writes the same.
    """
    keys = tl.where(counted, keys, LAST_KEY)
    tl.store(keys_at + o_e, keys, mask=m_e)
    tl.debug_barrier()
    ranks = tl.zeros_like(o_e)
    for begin in range(0, NUM_EXPERTS, CHUNK):
        o_other = begin + tl.arange(0, CHUNK)
        others = tl.load(keys_at + o_other, mask=o_other < NUM_EXPERTS, other=LAST_KEY)
        before = (others[None, :] < keys[:, None]) | (
            (others[None, :] == keys[:, None]) & (o_other[None, :] < o_e[:, None])
        )
        ranks += tl.sum(before.to(tl.int32), axis=1)
    return ranks


@triton.jit
def choose(
    scratch,  # int64 [3 * NUM_EXPERTS]
    keys,  # int64 [BLOCK_E]: the smallest leaves first
    missed,
    may_leave,
    num_free,
    num_demanded,
    max_bypassed,
    o_e,
    m_e,
    NUM_EXPERTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    MAY_BYPASS: tl.constexpr,
):
    """The admitted misses, the residents' places in eviction order, and how many leave."""
    num_missed = tl.sum(missed.to(tl.int32))
    ranks = rank(scratch, keys, may_leave, o_e, m_e, NUM_EXPERTS)
    num_pairs = tl.minimum(tl.sum(may_leave.to(tl.int32)), tl.maximum(num_missed - num_free, 0))
    if MAY_BYPASS:
        # Ascending by the negated score: the best miss first.
        order = rank(scratch + NUM_EXPERTS, -keys, missed, o_e, m_e, NUM_EXPERTS)
        if 10 * num_demanded > 6 * CAPACITY:
            rivals_at = scratch + 2 * NUM_EXPERTS
            tl.store(rivals_at + ranks, keys, mask=may_leave)
            tl.debug_barrier()
            opponent = order - num_free
            fights = missed & (opponent >= 0) & (opponent < num_pairs)
            rival = tl.load(rivals_at + opponent, mask=fights, other=LAST_KEY)
            wins = tl.sum((fights & (keys > rival)).to(tl.int32))
            num_pairs = tl.maximum(wins, num_pairs - max_bypassed)
    else:
        order = tl.cumsum(missed.to(tl.int32), 0) - 1  # ascending id
    admitted = missed & (order < num_free + num_pairs)
    num_admitted = tl.sum(admitted.to(tl.int32))
    return admitted, ranks, num_admitted, tl.maximum(num_admitted - num_free, 0)


@triton.jit
def move_shadow(
    to,  # int32 [E]: who is in it after this event
    scratch,
    shadow,
    keys,
    demanded,
    num_demanded,
    evict,
    max_bypassed,  # 0 makes it LRU, whose misses have equal keys
    o_e,
    m_e,
    NUM_EXPERTS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """One event of one of adv's shadow caches, or of LRU's."""
    stays = shadow
    lacking = demanded & (shadow == 0)
    if tl.sum(lacking.to(tl.int32)) > 0:
        may_go = shadow & (demanded == 0) & (evict != 0)
        enter, places, _, num_go = choose(
            scratch,
            keys,
            lacking,
            may_go,
            CAPACITY - tl.sum(shadow.to(tl.int32)),
            num_demanded,
            max_bypassed,
            o_e,
            m_e,
            NUM_EXPERTS,
            CAPACITY,
            True,
        )
        stays = (shadow & ((may_go & (places < num_go)) == 0)) | enter
    tl.store(to + o_e, stays.to(tl.int32), mask=m_e)
