"""The prefetch as device code: rows on their way until the layer asks."""

# ruff: noqa: N803 (kernel constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from hotexperts.kernels.gather.handover import begin, end, may_run
from hotexperts.kernels.gather.triton import FORM_SIZE, copy_block


@triton.jit(do_not_specialize=["num_tokens", "before", "layer"])
def prefetch_kernel(
    scores,  # float [num_tokens, E]: the higher, the likelier
    num_valid,  # int32 [1]: tokens from there on are padding
    switch,  # float32, see Switch
    slot_of,  # int32 [E], of the layer that is guessed for
    ahead,  # int32 [P, 2 + AHEAD_ROWS]: see AheadRows
    counters,  # int64, by AheadCounter
    rows,  # int32 [E, ROW_WORDS], page-locked host memory
    staging,  # int32, the rows ahead
    bases,  # int32 [NUM_TENSORS]: of packed tensors
    num_tokens,
    before,  # the layer whose plan came last
    layer,  # the one that is guessed for
    HAS_NUM_VALID: tl.constexpr,
    NUM_GUESSES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    AHEAD_ROWS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROW_OFFSETS: tl.constexpr,
    STAGING_OFFSETS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    FORMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    NUM_TENSORS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Copies the likeliest experts without a slot, until the layer asks or the rows are full.

    See `naive.prefetch`, which nobody stops.
    """
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    turn = ahead + i_program * (2 + AHEAD_ROWS)
    if tl.load(switch) > 0:  # noqa: SIM102 (who is off says nothing)
        if begin(turn, before, layer):
            o_e = tl.arange(0, BLOCK_E)
            left = o_e < NUM_EXPERTS
            best = tl.full([BLOCK_E], float("-inf"), tl.float32)
            num_real = num_tokens
            if HAS_NUM_VALID:
                num_real = tl.minimum(num_tokens, tl.load(num_valid))
            for i_token in range(num_real):
                b_scores = tl.load(
                    scores + i_token * NUM_EXPERTS + o_e, mask=left, other=float("-inf")
                )
                b_scores = b_scores.to(tl.float32)
                best = tl.where(b_scores > best, b_scores, best)  # and no NaN
            left = left & (best > float("-inf"))
            num_guesses = tl.minimum(tl.sum(left.to(tl.int32)), NUM_GUESSES)
            num_rows = tl.full([], 0, tl.int32)
            num_done = tl.full([], 0, tl.int32)
            is_running = 1
            while (num_guesses > 0) & (num_rows < AHEAD_ROWS) & (is_running != 0):
                highest = tl.max(tl.where(left, best, float("-inf")))
                expert = tl.min(tl.where(left & (best == highest), o_e, BLOCK_E))
                left = left & (o_e != expert)
                num_guesses -= 1
                if tl.load(slot_of + expert) < 0:
                    tl.store(turn + 2 + num_rows, expert)
                    source = rows + expert.to(tl.int64) * ROW_WORDS
                    for i_tensor in tl.static_range(NUM_TENSORS):
                        num_words = NUM_WORDS[i_tensor]
                        num_blocks = (num_words + BLOCKS[i_tensor] - 1) // BLOCKS[i_tensor]
                        base = tl.load(bases + i_tensor)
                        i_block = i_program
                        while (i_block < num_blocks) & (is_running != 0):
                            copy_block(
                                source + ROW_OFFSETS[i_tensor],
                                staging + STAGING_OFFSETS[i_tensor] + num_rows * num_words,
                                base,
                                num_words,
                                i_block,
                                FORMS,
                                i_tensor * FORM_SIZE,
                                BLOCKS[i_tensor],
                            )
                            num_done += 1
                            i_block += num_programs
                            is_running = may_run(turn, layer).to(tl.int32)
                    num_rows += 1
            tl.store(turn + 1, num_done)
            o_r = tl.arange(0, AHEAD_ROWS)
            tl.store(turn + 2 + o_r, -1, mask=o_r >= num_rows)
            tl.atomic_add(counters + 1, num_done.to(tl.int64), sem="relaxed")
            if i_program == 0:
                tl.atomic_add(counters, num_rows.to(tl.int64), sem="relaxed")
            end(turn, layer)
