"""Packed bf16 as device code: see packed12.py for the form."""

# ruff: noqa: N803 (kernel constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from hotexperts.kernels.gather import packed12

PLANE: tl.constexpr = tl.constexpr(packed12.PLANE_WORDS)


@triton.jit
def unpack_block(source, target, base, num_words, i_block, ROOM: tl.constexpr):
    """One block of one packed tensor, 4 * PLANE words of the target.

    `source` and `target` are int32 pointers, `num_words` counts the target's words.
    """
    o_word = tl.arange(0, PLANE)
    halves = target.to(tl.pointer_type(tl.int16))
    block = source + i_block * (3 * PLANE + ROOM)
    low = tl.load(block + o_word)
    high = tl.load(block + PLANE + o_word)
    codes = tl.load(block + 2 * PLANE + o_word)
    kept = tl.load(block + 3 * PLANE + tl.arange(0, ROOM))
    begin = i_block * 4 * PLANE
    for j in tl.static_range(4):
        signed = (low if j < 2 else high) >> (16 * (j % 2))
        first = _value(signed, codes >> (8 * j), base)
        second = _value(signed >> 8, codes >> (8 * j + 4), base)
        o_out = begin + j * PLANE + o_word
        # An exception's first 16 bits are anything, and base -1 makes them reach beyond.
        both = (first & 0xFFFF) | (second << 16)
        tl.store(target + o_out, both, mask=o_out < num_words)
    tl.debug_barrier()  # what the block's exceptions go over is written
    o_half = 2 * begin + (kept >> 16)
    tl.store(halves + o_half, kept.to(tl.int16), mask=(kept >= 0) & (o_half < 2 * num_words))


@triton.jit
def _value(signed, code, base):
    return ((signed & 0x80) << 8) | ((base + (code & 0xF)) << 7) | (signed & 0x7F)
