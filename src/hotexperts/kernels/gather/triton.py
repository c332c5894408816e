"""The gather as device code: whole rows from page-locked host memory, 16 bytes a load."""

# ruff: noqa: N803 (kernel constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_tensor(
    source,
    target,
    num_words,
    i_program,
    num_programs,
    BLOCK_WORDS: tl.constexpr,
):
    """This program's share of one tensor: blocks i_program, i_program + num_programs, ...

    `source` and `target` are int32 pointers; the caller promises 16-byte alignment of both, or
    the compiler sees none and splits the loads.
    """
    o_block = tl.arange(0, BLOCK_WORDS)
    for begin in range(i_program * BLOCK_WORDS, num_words, num_programs * BLOCK_WORDS):
        o_word = begin + o_block
        m_word = o_word < num_words
        b_words = tl.load(source + o_word, mask=m_word, other=0)
        tl.store(target + o_word, b_words, mask=m_word)


@triton.jit
def copy_row(
    rows,
    buffer,
    expert,
    slot,
    i_program,
    num_programs,
    ROW_WORDS: tl.constexpr,
    ROW_OFFSETS: tl.constexpr,
    SLOT_OFFSETS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    NUM_TENSORS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """This program's share of one expert's row, every tensor of it."""
    # Rows are megabytes: expert x ROW_WORDS passes 2^31.
    source = rows + expert.to(tl.int64) * ROW_WORDS
    for i_tensor in tl.static_range(NUM_TENSORS):
        copy_tensor(
            source + ROW_OFFSETS[i_tensor],
            buffer + SLOT_OFFSETS[i_tensor] + slot.to(tl.int64) * NUM_WORDS[i_tensor],
            NUM_WORDS[i_tensor],
            i_program,
            num_programs,
            BLOCK_WORDS,
        )
