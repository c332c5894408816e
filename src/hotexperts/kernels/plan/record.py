"""A policy records an event, as device code: new fields and the keys by which experts leave."""

# ruff: noqa: N803 (kernel constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

NUM_SHADOWS: tl.constexpr = tl.constexpr(7)
NUM_PLAYED: tl.constexpr = tl.constexpr(8)  # the last is LRU's
NUM_AVERAGES: tl.constexpr = tl.constexpr(7)


@triton.jit
def decay(values, use, share, weight, SMALLEST: tl.constexpr):
    """(share * values) + (weight * use), each operation rounded; what is tiny becomes 0."""
    values = values * share
    values = values + use * weight
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
def record_averages(
    policy_at,
    counts,
    demanded,
    o_e,
    m_e,
    NUM_EXPERTS: tl.constexpr,
    POLICY: tl.constexpr,
    RULES: tl.constexpr,
):
    """Ewma and auto: the bits of the averages, keys."""
    first = load_float(policy_at, o_e, m_e)
    if POLICY == "ewma":
        first = decay(first, demanded.to(tl.float32), RULES[0], 1.0, RULES[1])
        second, score = first, first
    else:
        use = tl.sqrt_rn(counts.to(tl.float32))
        first = decay(first, use, RULES[0], RULES[1], RULES[6])
        second = load_float(policy_at + NUM_EXPERTS, o_e, m_e)
        second = decay(second, use, RULES[2], RULES[3], RULES[6])
        score = first * RULES[4]
        score = score + second * RULES[5]
    return first.to(tl.int32, bitcast=True), second.to(tl.int32, bitcast=True), as_key(score)


@triton.jit
def adv_worth(
    state,
    held_at,
    demanded,
    num_demanded,
    num_missed,
    o_e,
    m_e,
    NUM_EXPERTS: tl.constexpr,
    RULES: tl.constexpr,
):
    """Each shadow's discounted hits after this event, `[8]`, the regret, the index, and hits."""
    o_j = tl.arange(0, NUM_PLAYED)
    held = tl.load(
        held_at + o_j[:, None] * NUM_EXPERTS + o_e[None, :],
        mask=(m_e & demanded)[None, :],
        other=0,
    )
    hits = tl.sum(held, axis=1)
    worth = tl.load(state + 3 + o_j).to(tl.float32, bitcast=True)
    worth = worth * RULES[0]
    worth = worth + hits.to(tl.float32)
    worth = tl.where(worth < RULES[2], 0.0, worth)
    best = tl.max(worth)
    index = tl.min(tl.where(worth == best, o_j, NUM_PLAYED))
    home = tl.sum(tl.where(o_j == RULES[3], worth, 0.0))
    index = tl.where(best > home * RULES[1], index, RULES[3])
    lru_hits = tl.sum(tl.where(o_j == NUM_SHADOWS, hits, 0))
    regret = tl.load(state + 11).to(tl.float32, bitcast=True)
    regret = regret * RULES[74]
    regret = regret + (lru_hits - (num_demanded - num_missed)).to(tl.float32)
    regret = tl.where(tl.abs(regret) < RULES[2], 0.0, regret)
    index = tl.where(regret > RULES[75] * num_demanded.to(tl.float32), NUM_SHADOWS, index)
    return worth, regret, index, hits


@triton.jit
def pick(index, RULES: tl.constexpr, FIRST: tl.constexpr):
    """Entry `index` of the seven in RULES from FIRST on, without a branch or a load."""
    value = tl.where(index == 1, RULES[FIRST + 1], RULES[FIRST])
    for j in tl.static_range(2, NUM_SHADOWS):
        value = tl.where(index == j, RULES[FIRST + j], value)
    return value


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
    fast = load_float(policy_at + pick(index, RULES, 4) * NUM_EXPERTS, o_e, m_e)
    slow = load_float(policy_at + pick(index, RULES, 11) * NUM_EXPERTS, o_e, m_e)
    fast = decay(fast, use, pick(index, RULES, 46), pick(index, RULES, 53), RULES[2])
    slow = decay(slow, use, pick(index, RULES, 60), pick(index, RULES, 67), RULES[2])
    score = fast * pick(index, RULES, 18)
    score = score + slow * pick(index, RULES, 25)
    return score


@triton.jit
def adv_advance(policy_at, counts, o_e, m_e, NUM_EXPERTS: tl.constexpr, RULES: tl.constexpr):
    """Write every average after this event, once nobody reads the old ones."""
    use = tl.sqrt_rn(counts.to(tl.float32))
    for i in tl.static_range(NUM_AVERAGES):
        at = policy_at + i * NUM_EXPERTS
        values = decay(load_float(at, o_e, m_e), use, RULES[32 + i], RULES[39 + i], RULES[2])
        tl.store(at + o_e, values.to(tl.int32, bitcast=True), mask=m_e)


@triton.jit
def add_counters(counters, num_demanded, num_missed, num_admitted, num_victims, num_waves):
    """Calls, hits, misses, bypasses, evictions, waves, copies: see `Counter`."""
    o_counter = tl.arange(0, 8)
    gain = tl.where(o_counter == 1, num_demanded - num_missed, 1)
    gain = tl.where(o_counter == 2, num_missed, gain)
    gain = tl.where(o_counter == 3, num_missed - num_admitted, gain)
    gain = tl.where(o_counter == 4, num_victims, gain)
    gain = tl.where(o_counter == 5, num_waves, gain)
    gain = tl.where(o_counter == 6, num_admitted, gain)
    # Atomic, because a bank that fills beside this launch counts its copies too.
    tl.atomic_add(counters + o_counter, gain.to(tl.int64), mask=o_counter < 7, sem="relaxed")


@triton.jit
def add_shadow_hits(counters, hits):
    """Of the seven shadows and LRU: see `Counter.SHADOW_HITS`."""
    o_j = tl.arange(0, NUM_PLAYED)
    tl.atomic_add(counters + 7 + o_j, hits.to(tl.int64), sem="relaxed")
