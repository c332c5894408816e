"""The prefetch as device code: rows on their way until the layer asks."""

# ruff: noqa: N803 (kernel constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from hotexperts.kernels.gather.triton import copy_block


@triton.jit(do_not_specialize=["first_key"])
def prefetch_kernel(
    guesses,  # int32 [NUM_GUESSES]: experts, the likeliest first, each once; -1 for none
    slot_of,  # int32 [E], of the layer that is guessed for
    ahead,  # int32: see AheadRows
    counters,  # int64, by AheadCounter
    rows,  # int32 [E, ROW_WORDS], page-locked host memory
    staging,  # int32, the rows ahead
    bases,  # int32 [NUM_TENSORS]: of packed tensors
    first_key,  # of the layer's expert 0
    NUM_GUESSES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    AHEAD_ROWS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROW_OFFSETS: tl.constexpr,
    STAGING_OFFSETS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    ROOMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    NUM_TENSORS: tl.constexpr,
):
    """Copies guessed experts that have no slot, in order, until told to stop or the rows are full.

    See `naive.prefetch`, which nobody stops.
    """
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    o_r = tl.arange(0, AHEAD_ROWS)
    # An atomic is one thread's, which tells the others: each would see the word at another time if
    # it loaded it, and part of a block be counted that was never copied.
    stop = tl.atomic_or(ahead, 0, sem="relaxed")
    num_rows = tl.full([], 0, tl.int32)
    num_done = tl.full([], 0, tl.int32)
    for i_guess in range(NUM_GUESSES):
        expert = tl.load(guesses + i_guess)
        is_expert = (expert >= 0) & (expert < NUM_EXPERTS)
        slot = tl.load(slot_of + expert, mask=is_expert, other=0)
        if is_expert & (slot < 0) & (num_rows < AHEAD_ROWS):
            if i_program == 0:
                tl.store(ahead + 1 + num_rows, first_key + expert)
            source = rows + expert.to(tl.int64) * ROW_WORDS
            for i_tensor in tl.static_range(NUM_TENSORS):
                num_words = NUM_WORDS[i_tensor]
                num_blocks = (num_words + BLOCKS[i_tensor] - 1) // BLOCKS[i_tensor]
                base = tl.load(bases + i_tensor)
                i_block = i_program
                while (i_block < num_blocks) & (stop == 0):
                    copy_block(
                        source + ROW_OFFSETS[i_tensor],
                        staging + STAGING_OFFSETS[i_tensor] + num_rows * num_words,
                        base,
                        num_words,
                        i_block,
                        ROOMS[i_tensor],
                        BLOCKS[i_tensor],
                    )
                    num_done += 1
                    i_block += num_programs
                    stop = tl.atomic_or(ahead, 0, sem="relaxed")
            num_rows += 1
    tl.store(ahead + 1 + AHEAD_ROWS + i_program, num_done)
    tl.atomic_add(counters + 1, num_done.to(tl.int64), sem="relaxed")
    if i_program == 0:
        tl.store(ahead + 1 + o_r, -1, mask=o_r >= num_rows)
        tl.atomic_add(counters, num_rows.to(tl.int64), sem="relaxed")
