"""A policy records an event, as device code: new fields and the keys by which experts leave."""

# ruff: noqa: N803 (kernel constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

NUM_SHADOWS: tl.constexpr = tl.constexpr(7)
NUM_AVERAGES: tl.constexpr = tl.constexpr(7)


@triton.jit
def decay(values, use, DECAY: tl.constexpr, WEIGHT: tl.constexpr, SMALLEST: tl.constexpr):
    """(decay * values) + (weight * use), each operation rounded; what is tiny becomes 0."""
    values = values * DECAY
    values = values + use * WEIGHT
    return tl.where(values < SMALLEST, 0.0, values)


@triton.jit
def as_key(score):
    """Scores are never negative, so their bits order as they do."""
    return score.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def load_float(pointer, o_e, m_e):
    """A float field of the state."""
    return tl.load(pointer + o_e, mask=m_e, other=0).to(tl.float32, bitcast=True)


@triton.jit
def record_counts(
    policy_at,
    powers,
    demanded,
    num_demanded,
    now,
    uses,
    o_e,
    m_e,
    NUM_EXPERTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    POLICY: tl.constexpr,
    RULES: tl.constexpr,
):
    """lru, lfu, lfru and lcp: last use, count, uses since halving, keys."""
    last_use = tl.load(policy_at + o_e, mask=m_e, other=0)
    last_use = tl.where(demanded, now, last_use)
    count = last_use
    if POLICY == "lru":
        keys = last_use.to(tl.int64)
    else:
        count = tl.load(policy_at + NUM_EXPERTS + o_e, mask=m_e, other=0)
        if POLICY == "lfu":
            count += tl.where(demanded, RULES[0], 0)
            uses += num_demanded
            halve = uses >= RULES[1] * CAPACITY
            count = tl.where(halve, count >> 1, count)
            uses = tl.where(halve, 0, uses)
            # Last use may be -1: shifted by one it stays in the low half.
            keys = (count.to(tl.int64) << 32) + (last_use + 1).to(tl.int64)
        else:
            count += demanded.to(tl.int32)
            age = now - last_use
            if POLICY == "lfru":
                score = tl.div_rn(count.to(tl.float32), (age + 1).to(tl.float32))
            else:
                power = tl.load(powers + tl.minimum(age, RULES[1]), mask=m_e, other=0.0)
                score = (count.to(tl.float32) + RULES[0]) * power
            keys = as_key(score)
    return last_use, count, uses, keys


@triton.jit
def adv_worth(state, held_at, demanded, o_e, m_e, NUM_EXPERTS: tl.constexpr, RULES: tl.constexpr):
    """Each shadow's discounted hits after this event, `[8]`, and the index that it makes.

    Hits are at most 512 each, so that three sums travel in one.
    """
    packed_0 = tl.zeros_like(o_e)
    packed_1 = tl.zeros_like(o_e)
    packed_2 = tl.zeros_like(o_e)
    for j in tl.static_range(NUM_SHADOWS):
        held = tl.load(held_at + j * NUM_EXPERTS + o_e, mask=m_e & demanded, other=0)
        if j < 3:
            packed_0 += held << (10 * j)
        elif j < 6:
            packed_1 += held << (10 * (j - 3))
        else:
            packed_2 += held
    o_j = tl.arange(0, 8)
    total = tl.where(o_j < 3, tl.sum(packed_0), tl.sum(packed_1))
    total = tl.where(o_j < 6, total, tl.sum(packed_2))
    hits = (total >> (10 * (o_j % 3))) & 1023
    m_j = o_j < NUM_SHADOWS
    worth = tl.load(state + 3 + o_j, mask=m_j, other=0).to(tl.float32, bitcast=True)
    worth = worth * RULES[0]
    worth = worth + hits.to(tl.float32)
    worth = tl.where((worth < RULES[2]) | (o_j >= NUM_SHADOWS), 0.0, worth)
    best = tl.max(worth)
    index = tl.min(tl.where((worth == best) & m_j, o_j, 8))
    home = tl.sum(tl.where(o_j == RULES[3], worth, 0.0))
    index = tl.where(best > home * RULES[1], index, RULES[3])
    return worth, index


@triton.jit
def adv_score(
    policy_at,
    counts,
    index,
    o_e,
    m_e,
    NUM_EXPERTS: tl.constexpr,
    RULES: tl.constexpr,
):
    """The score of shadow `index` from the averages after this event."""
    use = tl.sqrt_rn(counts.to(tl.float32))
    score = tl.zeros_like(use)
    for j in tl.static_range(NUM_SHADOWS):
        if index == j:
            # RULES from 4 on: rows, mixes, then each average's decay and weight.
            fast = load_float(policy_at + RULES[4 + j] * NUM_EXPERTS, o_e, m_e)
            slow = load_float(policy_at + RULES[11 + j] * NUM_EXPERTS, o_e, m_e)
            fast = decay(fast, use, RULES[32 + RULES[4 + j]], RULES[39 + RULES[4 + j]], RULES[2])
            slow = decay(slow, use, RULES[32 + RULES[11 + j]], RULES[39 + RULES[11 + j]], RULES[2])
            score = fast * RULES[18 + j]
            score = score + slow * RULES[25 + j]
    return score


@triton.jit
def adv_advance(policy_at, counts, o_e, m_e, NUM_EXPERTS: tl.constexpr, RULES: tl.constexpr):
    """Write every average after this event, once nobody reads the old ones."""
    use = tl.sqrt_rn(counts.to(tl.float32))
    for i in tl.static_range(NUM_AVERAGES):
        at = policy_at + i * NUM_EXPERTS
        values = decay(load_float(at, o_e, m_e), use, RULES[32 + i], RULES[39 + i], RULES[2])
        tl.store(at + o_e, values.to(tl.int32, bitcast=True), mask=m_e)
