"""Plan and gather in one launch: every program plans, each copies its share, the last one writes.

All programs read the same state and come to the same plan, so none waits for another. Who has
read the state says so in an atomic counter; the last to arrive knows that nobody reads any more
and writes the new state. The copies start as soon as a program's own plan is ready.
"""

# ruff: noqa: N803 (kernel constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from hotexperts.kernels.gather.triton import copy_row

CLOCK: tl.constexpr = tl.constexpr(0)
ARRIVED: tl.constexpr = tl.constexpr(1)
USES: tl.constexpr = tl.constexpr(2)
FIRST_FIELD: tl.constexpr = tl.constexpr(16)
LAST_KEY: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def _decay(values, use, DECAY: tl.constexpr, WEIGHT: tl.constexpr, SMALLEST: tl.constexpr):
    """(decay * values) + (weight * use), each operation rounded; what is tiny becomes 0."""
    values = values * DECAY
    values = values + use * WEIGHT
    return tl.where(values < SMALLEST, 0.0, values)


@triton.jit
def _ranks(keys_at, keys, counted, o_e, m_e, NUM_EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
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


@triton.jit(do_not_specialize=["num_ids", "top_k", "max_bypassed", "evict"])
def plan_gather_kernel(
    topk_ids,  # [N], int32 or int64
    num_valid_tokens,  # int32 [1]: later tokens are padding; read if HAS_NUM_VALID
    state,  # int32, see PlanLayout
    counters,  # int64 [6]
    remapped,  # [N], dtype of topk_ids
    rows,  # int32 [E, ROW_WORDS], page-locked host memory
    buffer,  # int32, the slots
    powers,  # float32, LCP's table; read by that policy only
    num_ids,
    top_k,
    max_bypassed,  # misses that may pass by of the policy's own will
    evict,  # 0 admits into free slots only
    NUM_EXPERTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    POLICY: tl.constexpr,
    RULES: tl.constexpr,
    SCRATCH: tl.constexpr,
    HAS_NUM_VALID: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROW_OFFSETS: tl.constexpr,
    SLOT_OFFSETS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    NUM_TENSORS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    slot_of_at = state + FIRST_FIELD
    expert_of_at = slot_of_at + NUM_EXPERTS
    passed_at = expert_of_at + CAPACITY
    policy_at = passed_at + NUM_EXPERTS
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < NUM_EXPERTS
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < CAPACITY

    # What is demanded.
    limit = num_ids
    if HAS_NUM_VALID:
        limit = tl.minimum(limit, tl.load(num_valid_tokens) * top_k)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for begin in range(0, num_ids, BLOCK_N):
        o_n = begin + tl.arange(0, BLOCK_N)
        b_ids = tl.load(topk_ids + o_n, mask=o_n < limit, other=-1).to(tl.int32)
        counts += tl.sum((b_ids[None, :] == o_e[:, None]).to(tl.int32), axis=1)
    demanded = counts > 0
    num_demanded = tl.sum(demanded.to(tl.int32))
    slot_of = tl.load(slot_of_at + o_e, mask=m_e, other=-1)
    resident = slot_of >= 0
    missed = demanded & (slot_of < 0)
    num_missed = tl.sum(missed.to(tl.int32))

    # The policy records the event.
    now = tl.load(state + CLOCK)
    uses = tl.load(state + USES)
    first = tl.load(policy_at + o_e, mask=m_e, other=0)
    second = first
    score = tl.zeros([BLOCK_E], tl.float32)
    if POLICY == "lru":
        first = tl.where(demanded, now, first)
        keys = first.to(tl.int64)
    elif POLICY == "lfu" or POLICY == "lfru" or POLICY == "lcp":
        first = tl.where(demanded, now, first)  # last use
        second = tl.load(policy_at + NUM_EXPERTS + o_e, mask=m_e, other=0)  # count
        if POLICY == "lfu":
            second += tl.where(demanded, RULES[0], 0)
            uses += num_demanded
            halve = uses >= RULES[1] * CAPACITY
            second = tl.where(halve, second >> 1, second)
            uses = tl.where(halve, 0, uses)
            # Last use may be -1: shifted by one it stays in the low half.
            keys = (second.to(tl.int64) << 32) + (first + 1).to(tl.int64)
        else:
            second += demanded.to(tl.int32)
            age = now - first
            if POLICY == "lfru":
                score = tl.div_rn(second.to(tl.float32), (age + 1).to(tl.float32))
            else:
                power = tl.load(powers + tl.minimum(age, RULES[1]), mask=m_e, other=0.0)
                score = (second.to(tl.float32) + RULES[0]) * power
            keys = score.to(tl.int32, bitcast=True).to(tl.int64)
    elif POLICY == "ewma":
        score = first.to(tl.float32, bitcast=True)
        score = _decay(score, demanded.to(tl.float32), RULES[0], 1.0, RULES[1])
        first = score.to(tl.int32, bitcast=True)
        keys = first.to(tl.int64)
    else:
        tl.static_assert(POLICY == "auto")
        second = tl.load(policy_at + NUM_EXPERTS + o_e, mask=m_e, other=0)
        use = tl.sqrt_rn(counts.to(tl.float32))
        fast = _decay(first.to(tl.float32, bitcast=True), use, RULES[0], RULES[1], RULES[6])
        slow = _decay(second.to(tl.float32, bitcast=True), use, RULES[2], RULES[3], RULES[6])
        score = fast * RULES[4]
        score = score + slow * RULES[5]
        first = fast.to(tl.int32, bitcast=True)
        second = slow.to(tl.int32, bitcast=True)
        keys = score.to(tl.int32, bitcast=True).to(tl.int64)

    # Who enters, and where: free slots first, then the victims'.
    new_slot_of = slot_of
    admitted = missed
    target = slot_of
    num_admitted = 0
    num_victims = 0
    place = o_e
    # Programs are at different points: each area below holds one thing for the whole launch.
    keys_at = (state + SCRATCH).to(tl.pointer_type(tl.int64))
    best_at = keys_at + NUM_EXPERTS
    rivals_at = best_at + NUM_EXPERTS
    map_at = state + SCRATCH + 6 * NUM_EXPERTS
    target_at = map_at + NUM_EXPERTS
    if num_missed > 0:
        expert_of = tl.load(expert_of_at + o_c, mask=m_c, other=0)
        is_free = (expert_of < 0) & m_c
        num_free = tl.sum(is_free.to(tl.int32))
        may_leave = resident & (demanded == 0) & (evict != 0)
        ranks = _ranks(keys_at, keys, may_leave, o_e, m_e, NUM_EXPERTS, 32)
        num_pairs = tl.minimum(tl.sum(may_leave.to(tl.int32)), tl.maximum(num_missed - num_free, 0))
        if POLICY == "auto":
            # Ascending by the negated score: the best miss first.
            best = _ranks(best_at, -keys, missed, o_e, m_e, NUM_EXPERTS, 32)
            if 10 * num_demanded > 6 * CAPACITY:
                tl.store(rivals_at + ranks, keys, mask=may_leave)
                tl.debug_barrier()
                opponent = best - num_free
                fights = missed & (opponent >= 0) & (opponent < num_pairs)
                rival = tl.load(rivals_at + opponent, mask=fights, other=LAST_KEY)
                wins = tl.sum((fights & (keys > rival)).to(tl.int32))
                num_pairs = tl.maximum(wins, num_pairs - max_bypassed)
            admitted = missed & (best < num_free + num_pairs)
        place = tl.cumsum(admitted.to(tl.int32), 0) - 1
        if POLICY != "auto":
            place = tl.cumsum(missed.to(tl.int32), 0) - 1
            admitted = missed & (place < num_free + num_pairs)
        num_admitted = tl.sum(admitted.to(tl.int32))
        num_victims = tl.maximum(num_admitted - num_free, 0)
        leaves = may_leave & (ranks < num_victims)
        free_place = tl.cumsum(is_free.to(tl.int32), 0) - 1
        tl.store(target_at + free_place, o_c, mask=is_free)
        tl.store(target_at + num_free + ranks, slot_of, mask=leaves)
        tl.debug_barrier()
        target = tl.load(target_at + place, mask=admitted, other=-1)
        new_slot_of = tl.where(admitted, target, tl.where(leaves, -1, slot_of))

    # Nobody may write the state before all have read it.
    tl.debug_barrier()
    is_last = tl.atomic_add(state + ARRIVED, 1, sem="acq_rel") == num_programs - 1

    # Remapped ids, from a map that every program writes alike beside the state.
    tl.store(map_at + o_e, new_slot_of, mask=m_e)
    tl.debug_barrier()
    for begin in range(i_program * BLOCK_N, num_ids, num_programs * BLOCK_N):
        o_n = begin + tl.arange(0, BLOCK_N)
        b_ids = tl.load(topk_ids + o_n, mask=o_n < limit, other=-1)
        b_slots = tl.load(map_at + b_ids, mask=b_ids >= 0, other=-1)
        tl.store(remapped + o_n, b_slots.to(b_ids.dtype), mask=o_n < num_ids)

    if is_last:
        tl.store(state + CLOCK, now + 1)
        tl.store(state + ARRIVED, 0)
        tl.store(policy_at + o_e, first, mask=m_e)
        if POLICY == "lfu":
            tl.store(state + USES, uses)
        if POLICY != "lru" and POLICY != "ewma":
            tl.store(policy_at + NUM_EXPERTS + o_e, second, mask=m_e)
        bypassed = missed & (admitted == 0)
        passed = tl.where(bypassed, tl.cumsum(bypassed.to(tl.int32), 0) - 1, -1)
        tl.store(passed_at + o_e, passed, mask=m_e)
        if num_missed > 0:
            tl.store(slot_of_at + o_e, new_slot_of, mask=m_e)
            tl.store(expert_of_at + target, o_e, mask=admitted)
        num_bypassed = num_missed - num_admitted
        o_counter = tl.arange(0, 8)
        gain = tl.where(o_counter == 1, num_demanded - num_missed, 1)
        gain = tl.where(o_counter == 2, num_missed, gain)
        gain = tl.where(o_counter == 3, num_bypassed, gain)
        gain = tl.where(o_counter == 4, num_victims, gain)
        m_counter = o_counter < 6
        totals = tl.load(counters + o_counter, mask=m_counter, other=0)
        tl.store(counters + o_counter, totals + gain, mask=m_counter)

    # Every program copies a share of every row.
    for i_copy in range(0, num_admitted):
        chosen = admitted & (place == i_copy)
        expert = tl.sum(tl.where(chosen, o_e, 0))
        slot = tl.sum(tl.where(chosen, target, 0))
        copy_row(
            rows,
            buffer,
            expert,
            slot,
            i_program,
            num_programs,
            ROW_WORDS,
            ROW_OFFSETS,
            SLOT_OFFSETS,
            NUM_WORDS,
            NUM_TENSORS,
            BLOCK_WORDS,
        )
