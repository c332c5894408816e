"""Plan and gather in one launch: every program plans, each copies its share, the last one writes.

All programs read the same state and come to the same plan, so none waits for another. Who has
read the state says so in an atomic counter; the last to arrive knows that nobody reads any more
and writes the new state. The copies start as soon as a program's own plan is ready.
"""

# ruff: noqa: N803 (kernel constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from hotexperts.kernels.gather.handover import ask, wait_for_end
from hotexperts.kernels.gather.triton import blocks_of_row, copy_row
from hotexperts.kernels.plan.choose import choose, move_shadow
from hotexperts.kernels.plan.count import count_ids, num_counted
from hotexperts.kernels.plan.record import (
    NUM_AVERAGES,
    NUM_PLAYED,
    NUM_SHADOWS,
    add_counters,
    add_shadow_hits,
    adv_advance,
    adv_score,
    adv_worth,
    as_key,
    record_averages,
    record_counts,
)
from hotexperts.kernels.prefetch.judge import record_switch

CLOCK: tl.constexpr = tl.constexpr(0)
ARRIVED: tl.constexpr = tl.constexpr(1)
USES: tl.constexpr = tl.constexpr(2)
WORTH: tl.constexpr = tl.constexpr(3)
REGRET: tl.constexpr = tl.constexpr(11)
FIRST_FIELD: tl.constexpr = tl.constexpr(16)


@triton.jit(do_not_specialize=["num_ids", "top_k", "max_bypassed", "evict", "num_waves", "layer"])
def plan_gather_kernel(
    topk_ids,  # [N], int32 or int64
    num_valid_tokens,  # int32 [1]: later tokens are padding; read if HAS_NUM_VALID
    counted,  # int32 [E]: uses of each expert; read if HAS_COUNTS
    state,  # int32, see PlanLayout
    counters,  # int64 [NUM_COUNTERS]
    remapped,  # [N], dtype of topk_ids
    rows,  # int32 [E, ROW_WORDS], page-locked host memory
    buffer,  # int32, the slots
    bases,  # int32 [NUM_TENSORS]: of packed tensors
    ahead,  # int32 [P, 2 + AHEAD_ROWS]: see AheadRows; read if AHEAD_ROWS > 0, as the next two are
    staging,  # int32, its rows
    switch,  # float32: see Switch
    ahead_counters,  # int64, by AheadCounter
    powers,  # float32, LCP's table; read by that policy only
    num_ids,
    top_k,
    max_bypassed,  # misses that may pass by of the policy's own will
    evict,  # 0 admits into free slots only
    num_waves,  # what the call is going to take, for the counters
    layer,  # its number, for the rows ahead
    NUM_EXPERTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    POLICY: tl.constexpr,
    RULES: tl.constexpr,
    SCRATCH: tl.constexpr,
    SHADOW_SCRATCH: tl.constexpr,
    MAY_BYPASS: tl.constexpr,
    HAS_NUM_VALID: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROW_OFFSETS: tl.constexpr,
    SLOT_OFFSETS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    FORMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    NUM_TENSORS: tl.constexpr,
    STAGING_OFFSETS: tl.constexpr,
    AHEAD_ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One event of one layer: see the module, and `naive.plan` for what it does."""
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    slot_of_at = state + FIRST_FIELD
    expert_of_at = slot_of_at + NUM_EXPERTS
    passed_at = expert_of_at + CAPACITY
    policy_at = passed_at + NUM_EXPERTS
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < NUM_EXPERTS
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < CAPACITY
    turn = ahead + i_program * (2 + AHEAD_ROWS)
    if AHEAD_ROWS > 0:
        found_turn = ask(turn, layer)

    # What is demanded.
    limit = num_counted(num_valid_tokens, num_ids, top_k, HAS_NUM_VALID)
    if HAS_COUNTS:
        counts = tl.load(counted + o_e, mask=m_e, other=0)
    else:
        counts = count_ids(topk_ids, 0, BLOCK_N, limit, o_e, BLOCK_N)
    demanded = (counts > 0) & m_e
    num_demanded = tl.sum(demanded.to(tl.int32))
    slot_of = tl.load(slot_of_at + o_e, mask=m_e, other=-1)
    resident = slot_of >= 0
    missed = demanded & (slot_of < 0)
    num_missed = tl.sum(missed.to(tl.int32))

    # The policy records the event.
    now = tl.load(state + CLOCK)
    uses = tl.load(state + USES)
    if POLICY == "adv":
        held_at = policy_at + (NUM_AVERAGES + (now & 1) * NUM_PLAYED) * NUM_EXPERTS
        last_use_at = policy_at + (NUM_AVERAGES + 2 * NUM_PLAYED) * NUM_EXPERTS
        worth, regret, index, shadow_hits = adv_worth(
            state, held_at, demanded, num_demanded, num_missed, o_e, m_e, NUM_EXPERTS, RULES
        )
        keys = tl.zeros([BLOCK_E], tl.int64)  # asked for only where something is missed
        # Each of the first programs also plays one shadow; it reads now and moves it later.
        shadow_keys = as_key(adv_score(policy_at, counts, i_program, o_e, m_e, NUM_EXPERTS, RULES))
        last_use = tl.where(demanded, now, tl.load(last_use_at + o_e, mask=m_e, other=0))
        is_lru = i_program == NUM_SHADOWS
        shadow_keys = tl.where(is_lru, last_use.to(tl.int64), shadow_keys)
        m_shadow = m_e & (i_program < NUM_PLAYED)
        shadow = tl.load(held_at + i_program * NUM_EXPERTS + o_e, mask=m_shadow, other=0) > 0
    elif POLICY == "ewma" or POLICY == "auto":
        first, second, keys = record_averages(
            policy_at, counts, demanded, o_e, m_e, NUM_EXPERTS, POLICY, RULES
        )
    else:
        first, second, uses, keys = record_counts(
            policy_at,
            powers,
            demanded,
            num_demanded,
            now,
            uses,
            o_e,
            m_e,
            NUM_EXPERTS,
            CAPACITY,
            POLICY,
            RULES,
        )

    # Who enters, and where: free slots first, then the victims'.
    new_slot_of = slot_of
    admitted = missed
    target = slot_of
    num_admitted = 0
    num_victims = 0
    place = o_e
    # Programs are at different points: each area below holds one thing for the whole launch.
    scratch = (state + SCRATCH).to(tl.pointer_type(tl.int64))
    map_at = state + SCRATCH + 6 * NUM_EXPERTS
    target_at = map_at + NUM_EXPERTS
    if num_missed > 0:
        if POLICY == "adv":
            keys = as_key(adv_score(policy_at, counts, index, o_e, m_e, NUM_EXPERTS, RULES))
            keys = tl.where(index == NUM_SHADOWS, last_use.to(tl.int64), keys)
        expert_of = tl.load(expert_of_at + o_c, mask=m_c, other=0)
        is_free = (expert_of < 0) & m_c
        num_free = tl.sum(is_free.to(tl.int32))
        may_leave = resident & (demanded == 0) & (evict != 0)
        admitted, ranks, num_admitted, num_victims = choose(
            scratch,
            keys,
            missed,
            may_leave,
            num_free,
            num_demanded,
            max_bypassed,
            o_e,
            m_e,
            NUM_EXPERTS,
            CAPACITY,
            MAY_BYPASS,
        )
        place = tl.cumsum(admitted.to(tl.int32), 0) - 1
        leaves = may_leave & (ranks < num_victims)
        free_place = tl.cumsum(is_free.to(tl.int32), 0) - 1
        tl.store(target_at + free_place, o_c, mask=is_free)
        tl.store(target_at + num_free + ranks, slot_of, mask=leaves)
        tl.debug_barrier()
        target = tl.load(target_at + place, mask=admitted, other=-1)
        new_slot_of = tl.where(admitted, target, tl.where(leaves, -1, slot_of))

    if AHEAD_ROWS > 0:
        o_r = tl.arange(0, AHEAD_ROWS)
        has_rows = wait_for_end(turn, found_turn, layer)
        ahead_experts = tl.where(has_rows, tl.load(turn + 2 + o_r), -1)
        num_ahead = tl.load(turn + 1)

    # Nobody may write the state before all have read it.
    tl.debug_barrier()
    is_last = tl.atomic_add(state + ARRIVED, 1, sem="acq_rel") == num_programs - 1

    # Remapped ids, from a map that every program writes alike beside the state.
    tl.store(map_at + o_e, new_slot_of, mask=m_e)
    tl.debug_barrier()
    for begin in range(i_program * BLOCK_N, num_ids, num_programs * BLOCK_N):
        o_n = begin + tl.arange(0, BLOCK_N)
        b_ids = tl.load(topk_ids + o_n, mask=o_n < limit, other=-1)
        is_expert = (b_ids >= 0) & (b_ids < NUM_EXPERTS)
        b_slots = tl.load(map_at + b_ids, mask=is_expert, other=-1)
        b_slots = tl.where(o_n < limit, b_slots, 0)
        tl.store(remapped + o_n, b_slots.to(b_ids.dtype), mask=o_n < num_ids)

    if is_last:
        tl.store(state + CLOCK, now + 1)
        tl.store(state + ARRIVED, 0)
        if POLICY == "adv":
            o_j = tl.arange(0, NUM_PLAYED)
            tl.store(state + WORTH + o_j, worth.to(tl.int32, bitcast=True))
            tl.store(state + REGRET, regret.to(tl.int32, bitcast=True))
            adv_advance(policy_at, counts, o_e, m_e, NUM_EXPERTS, RULES)
            tl.store(last_use_at + o_e, last_use, mask=m_e)
            add_shadow_hits(counters, shadow_hits)
        else:
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
        add_counters(counters, num_demanded, num_missed, num_admitted, num_victims, num_waves)

    # Every program copies a share of every row.
    num_used = tl.full([], 0, tl.int32)
    num_saved = tl.full([], 0, tl.int32)
    for i_copy in range(0, num_admitted):
        chosen = admitted & (place == i_copy)
        expert = tl.sum(tl.where(chosen, o_e, 0))
        slot = tl.sum(tl.where(chosen, target, 0))
        row = 0
        num_done = 0
        if AHEAD_ROWS > 0:
            row = tl.max(tl.where(ahead_experts == expert, o_r, -1))
            num_used += (row >= 0).to(tl.int32)
            num_row = blocks_of_row(i_program, num_programs, NUM_WORDS, BLOCKS, NUM_TENSORS)
            num_done = tl.minimum(tl.maximum(num_ahead - row * num_row, 0), num_row)
            num_done = tl.where(row >= 0, num_done, 0)
            num_saved += num_done
            row = tl.maximum(row, 0)
        copy_row(
            rows,
            buffer,
            bases,
            expert,
            slot,
            i_program,
            num_programs,
            staging,
            row,
            num_done,
            ROW_WORDS,
            ROW_OFFSETS,
            SLOT_OFFSETS,
            STAGING_OFFSETS,
            NUM_WORDS,
            FORMS,
            BLOCKS,
            NUM_TENSORS,
        )
    if AHEAD_ROWS > 0:
        tl.atomic_add(ahead_counters + 3, num_saved.to(tl.int64), sem="relaxed")
        if i_program == 0:
            tl.atomic_add(ahead_counters + 2, num_used.to(tl.int64), sem="relaxed")
            record_switch(switch, tl.sum((ahead_experts >= 0).to(tl.int32)), num_used)

    # The shadows move off the critical path, into the half of the state that nobody reads now.
    if POLICY == "adv":  # noqa: SIM102 (the outer one is decided when the kernel is compiled)
        if i_program < NUM_PLAYED:
            other_half = (NUM_AVERAGES + ((now + 1) & 1) * NUM_PLAYED) * NUM_EXPERTS
            move_shadow(
                policy_at + other_half + i_program * NUM_EXPERTS,
                (state + SHADOW_SCRATCH).to(tl.pointer_type(tl.int64))
                + i_program * 3 * NUM_EXPERTS,
                shadow,
                shadow_keys,
                demanded,
                num_demanded,
                evict,
                tl.where(is_lru, 0, NUM_EXPERTS),
                o_e,
                m_e,
                NUM_EXPERTS,
                CAPACITY,
            )
