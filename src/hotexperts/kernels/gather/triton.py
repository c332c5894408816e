"""The gather as device code: whole rows from page-locked host memory, 16 bytes a load."""

# ruff: noqa: N803 (kernel constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from hotexperts.kernels.gather import packing
from hotexperts.kernels.gather.unpack import unpack_block
from hotexperts.kernels.gather.unscale import move_tile, unscale_block

PACKED12: tl.constexpr = tl.constexpr(packing.PACKED12)
SCALED: tl.constexpr = tl.constexpr(packing.SCALED)
FORM_SIZE: tl.constexpr = tl.constexpr(packing.FORM_SIZE)


@triton.jit
def copy_block(
    source,
    target,
    base,
    num_words,
    i_block,
    FORMS: tl.constexpr,
    FORM: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One block of one tensor, `WORDS` words of the target, unpacked as its form says.

    The form's numbers begin at place `FORM`. `source` and `target` are int32 pointers; the caller
    promises 16-byte alignment of both, or the compiler sees none and splits the loads.
    """
    if FORMS[FORM] == PACKED12:
        unpack_block(source, target, base, num_words, i_block, FORMS[FORM + 1])
    elif FORMS[FORM] == SCALED:
        unscale_block(source, target, i_block, FORMS, FORM)
    else:
        move_words(source, target, num_words, i_block, WORDS)


@triton.jit
def move_block(
    source,
    target,
    num_words,
    i_block,
    FORMS: tl.constexpr,
    FORM: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The words that `copy_block` writes, from where they lie as in a slot already."""
    if FORMS[FORM] == SCALED:
        move_tile(source, target, i_block, FORMS, FORM)
    else:
        move_words(source, target, num_words, i_block, WORDS)


@triton.jit
def move_words(source, target, num_words, i_block, WORDS: tl.constexpr):
    """A block of consecutive words."""
    o_word = i_block * WORDS + tl.arange(0, WORDS)
    m_word = o_word < num_words
    tl.store(target + o_word, tl.load(source + o_word, mask=m_word, other=0), mask=m_word)


@triton.jit
def blocks_of_row(
    i_program,
    num_programs,
    NUM_WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    NUM_TENSORS: tl.constexpr,
):
    """How many blocks of a row are this program's, those of all tensors together."""
    num = 0
    for i_tensor in tl.static_range(NUM_TENSORS):
        num_blocks = (NUM_WORDS[i_tensor] + BLOCKS[i_tensor] - 1) // BLOCKS[i_tensor]
        num += tl.maximum(num_blocks - i_program + num_programs - 1, 0) // num_programs
    return num


@triton.jit
def copy_row(
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
    ROW_WORDS: tl.constexpr,
    ROW_OFFSETS: tl.constexpr,
    SLOT_OFFSETS: tl.constexpr,
    STAGING_OFFSETS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    FORMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    NUM_TENSORS: tl.constexpr,
):
    """This program's share of one expert's row: every num_programs-th block of every tensor.

    Its first `num_done` blocks, counted over the tensors, are in a row of the staging buffer, as
    they are in a slot.
    """
    # Rows are megabytes: expert x ROW_WORDS passes 2^31.
    source = rows + expert.to(tl.int64) * ROW_WORDS
    for i_tensor in tl.static_range(NUM_TENSORS):
        num_words = NUM_WORDS[i_tensor]
        num_blocks = (num_words + BLOCKS[i_tensor] - 1) // BLOCKS[i_tensor]
        target = buffer + SLOT_OFFSETS[i_tensor] + slot.to(tl.int64) * num_words
        staged = staging + STAGING_OFFSETS[i_tensor] + row * num_words
        num_mine = tl.maximum(num_blocks - i_program + num_programs - 1, 0) // num_programs
        num_staged = tl.minimum(tl.maximum(num_done, 0), num_mine)
        num_done -= num_mine
        from_host = i_program + num_staged * num_programs
        for i_block in range(i_program, from_host, num_programs):
            move_block(
                staged,
                target,
                num_words,
                i_block,
                FORMS,
                i_tensor * FORM_SIZE,
                BLOCKS[i_tensor],
            )
        base = tl.load(bases + i_tensor)
        for i_block in range(from_host, num_blocks, num_programs):
            copy_block(
                source + ROW_OFFSETS[i_tensor],
                target,
                base,
                num_words,
                i_block,
                FORMS,
                i_tensor * FORM_SIZE,
                BLOCKS[i_tensor],
            )


@triton.jit(
    do_not_specialize=["num_ids", "first"],
    # Or a slice of these at another address would load one more kernel, which no capture may.
    do_not_specialize_on_alignment=["topk_ids", "local", "row_of", "num_fills", "copies"],
)
def fill_bank_kernel(
    topk_ids,  # [N], int32 or int64
    local,  # [N], same dtype: bank rows, -1 where this part does not serve the pair
    row_of,  # int32 [E]: the same by expert
    passed,  # int32 [E]: place of an expert among the bypassed, -1 for others
    num_fills,  # int32 [1]: counts these launches
    copies,  # int64 [1]: counts the rows copied
    rows,  # int32 [E, ROW_WORDS], page-locked host memory
    bank,  # int32, the bank's rows
    bases,  # int32 [NUM_TENSORS]: of packed tensors
    num_ids,
    first,  # the part holds the places first, ..., first + NUM_ROWS - 1
    NUM_EXPERTS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROW_OFFSETS: tl.constexpr,
    BANK_OFFSETS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    FORMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    NUM_TENSORS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One part of one layer call: see `naive.fill_bank`."""
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < NUM_EXPERTS
    places = tl.load(passed + o_e, mask=m_e, other=-1)
    for begin in range(i_program * BLOCK_N, num_ids, num_programs * BLOCK_N):
        o_n = begin + tl.arange(0, BLOCK_N)
        b_ids = tl.load(topk_ids + o_n, mask=o_n < num_ids, other=-1)
        is_expert = (b_ids >= 0) & (b_ids < NUM_EXPERTS)
        b_rows = tl.load(passed + b_ids, mask=is_expert, other=-1) - first
        is_here = is_expert & (b_rows >= 0) & (b_rows < NUM_ROWS)
        b_rows = tl.where(is_here, b_rows, -1).to(b_ids.dtype)
        tl.store(local + o_n, b_rows, mask=o_n < num_ids)

    is_mine = (places >= first) & (places < first + NUM_ROWS)
    if i_program == 0:
        tl.store(row_of + o_e, tl.where(is_mine, places - first, -1), mask=m_e)
        tl.atomic_add(num_fills, 1, sem="relaxed")
        tl.atomic_add(copies, tl.sum(is_mine.to(tl.int64)), sem="relaxed")
    for i_row in range(0, NUM_ROWS):
        chosen = is_mine & (places == first + i_row)
        expert = tl.sum(tl.where(chosen, o_e, 0))
        row = tl.max(tl.where(chosen, places - first, -1))
        if row >= 0:
            copy_row(
                rows,
                bank,
                bases,
                expert,
                row,
                i_program,
                num_programs,
                bank,
                0,
                0,
                ROW_WORDS,
                ROW_OFFSETS,
                BANK_OFFSETS,
                BANK_OFFSETS,
                NUM_WORDS,
                FORMS,
                BLOCKS,
                NUM_TENSORS,
            )
