"""Scaled codes as device code: see scaled.py for the form."""

# ruff: noqa: N803, N806 (kernel constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from hotexperts.kernels.gather import codes as spec
from hotexperts.kernels.gather import scaled

INT8: tl.constexpr = tl.constexpr(spec.INT8)
E4M3: tl.constexpr = tl.constexpr(spec.E4M3)
INT4: tl.constexpr = tl.constexpr(spec.INT4)
E2M1: tl.constexpr = tl.constexpr(spec.E2M1)
HALF_SCALES: tl.constexpr = tl.constexpr(scaled.HALF_SCALES)
ZEROS: tl.constexpr = tl.constexpr(scaled.ZEROS)

# Places in a form.
CODE: tl.constexpr = tl.constexpr(1)
TILE_ROWS: tl.constexpr = tl.constexpr(2)
TILE_COLUMNS: tl.constexpr = tl.constexpr(3)
COLUMNS: tl.constexpr = tl.constexpr(4)
GROUP_ROWS: tl.constexpr = tl.constexpr(5)
GROUP_COLUMNS: tl.constexpr = tl.constexpr(6)
SCALES: tl.constexpr = tl.constexpr(7)  # bits of one, and what else is known of it
IS_BF16: tl.constexpr = tl.constexpr(8)
TILE_WORDS: tl.constexpr = tl.constexpr(9)


@triton.jit
def unscale_block(source, target, i_tile, FORMS: tl.constexpr, FORM: tl.constexpr):
    """One tile of one tensor; `source` and `target` are int32 pointers."""
    KIND: tl.constexpr = FORMS[FORM + CODE]
    ROWS: tl.constexpr = FORMS[FORM + GROUP_ROWS]  # that share a scale
    WIDTH: tl.constexpr = FORMS[FORM + GROUP_COLUMNS]
    KEPT: tl.constexpr = FORMS[FORM + SCALES]
    TO_BF16: tl.constexpr = FORMS[FORM + IS_BF16]
    PARTS: tl.constexpr = 2 if KIND <= E4M3 else 4
    PART_ROWS: tl.constexpr = FORMS[FORM + TILE_ROWS] // PARTS
    HALF: tl.constexpr = FORMS[FORM + TILE_COLUMNS] // 2
    PARTS_ALIKE: tl.constexpr = max(1, min(PARTS, ROWS // PART_ROWS))
    SECOND: tl.constexpr = 16 // PARTS  # bits from a word's first code to its second
    o_row, o_word = tl.arange(0, PART_ROWS), tl.arange(0, HALF)
    block = source + i_tile * FORMS[FORM + TILE_WORDS]
    scales = block + PART_ROWS * HALF
    codes = tl.load(block + o_row[:, None] * HALF + o_word[None, :])
    for j in tl.static_range(PARTS):
        if WIDTH >= 2 * HALF:  # a row has one
            at = (j * PART_ROWS + o_row) // ROWS
            first = _scale(scales, at, KEPT)[:, None]
            second = first
            zero = _zero(scales, at, KEPT)[:, None]
        elif j % PARTS_ALIKE == 0:  # the rows of a few parts have the same
            at = (j * PART_ROWS // ROWS) * (2 * HALF // WIDTH)
            of_row = _scale(scales, at + tl.arange(0, 2 * HALF) // WIDTH, KEPT)
            even, odd = tl.split(tl.reshape(of_row, (HALF, 2)))
            first, second = even[None, :], odd[None, :]
            zero = first  # there are none
        both = codes >> (32 // PARTS * j)
        low = _value(both, first, zero, KIND, TO_BF16, KEPT)
        high = _value(both >> SECOND, second, zero, KIND, TO_BF16, KEPT)
        o_out = _places(i_tile, j, FORMS, FORM)
        tl.store(target + o_out, (low & 0xFFFF) | (high << 16))


@triton.jit
def move_tile(source, target, i_tile, FORMS: tl.constexpr, FORM: tl.constexpr):
    """The words that `unscale_block` writes, from where they lie as in a slot already."""
    KIND: tl.constexpr = FORMS[FORM + CODE]
    for j in tl.static_range(2 if KIND <= E4M3 else 4):
        o_out = _places(i_tile, j, FORMS, FORM)
        tl.store(target + o_out, tl.load(source + o_out))


@triton.jit
def _places(i_tile, j: tl.constexpr, FORMS: tl.constexpr, FORM: tl.constexpr):
    """Where part j of a tile is in a slot, in words."""
    KIND: tl.constexpr = FORMS[FORM + CODE]
    PARTS: tl.constexpr = 2 if KIND <= E4M3 else 4
    PART_ROWS: tl.constexpr = FORMS[FORM + TILE_ROWS] // PARTS
    HALF: tl.constexpr = FORMS[FORM + TILE_COLUMNS] // 2
    ACROSS: tl.constexpr = FORMS[FORM + COLUMNS] // FORMS[FORM + TILE_COLUMNS]
    begin = i_tile // ACROSS * FORMS[FORM + TILE_ROWS] + j * PART_ROWS
    o_row = begin + tl.arange(0, PART_ROWS)
    o_word = i_tile % ACROSS * HALF + tl.arange(0, HALF)
    return o_row[:, None] * (FORMS[FORM + COLUMNS] // 2) + o_word[None, :]


@triton.jit
def _value(code, scale, zero, KIND: tl.constexpr, TO_BF16: tl.constexpr, KEPT: tl.constexpr):
    """The low 16 bits of the result: the code's number, from its zero point, times its scale."""
    number = _size(code, KIND)
    if KEPT >= ZEROS:
        number = number - zero
    product = number * scale
    if TO_BF16:  # by hand: the interpreter would cut what does not fit
        bits = product.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        if KIND == E4M3:  # a GPU's NaN would go over into the sign
            rounded = tl.where(product != product, 0x7FC0, rounded)
    else:
        rounded = product.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    # The sign comes last, for the zeros that have one.
    if KIND == E4M3:
        return rounded ^ ((code & 0x80) << 8)
    elif KIND == E2M1:
        return rounded ^ ((code & 8) << 12)
    else:
        return rounded


@triton.jit
def _size(code, KIND: tl.constexpr):
    """What the low bits of a word stand for, without the sign where it is a bit; exact."""
    if KIND == INT8:
        return ((code << 24) >> 24).to(tl.float32)
    elif KIND == INT4:
        return ((code << 28) >> 28).to(tl.float32)
    elif KIND == E4M3:
        bits = tl.where((code & 0x7F) == 0x7F, 0x7FC00000, (code & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    else:
        # Twice the numbers of the eight sizes, a half byte each: 0, 1, 2, 3, 4, 6, 8, 12.
        return ((-0x379BCDF0 >> (4 * (code & 7))) & 0xF).to(tl.float32) * 0.5


@triton.jit
def _scale(scales, at, KEPT: tl.constexpr):
    """Scales as float32; where they have zero points, those are the high halves of their words."""
    if KEPT == 32 or KEPT >= ZEROS:
        bits = tl.load(scales + at)
    elif KEPT == 8:
        bits = tl.load(scales.to(tl.pointer_type(tl.uint8)) + at).to(tl.int32) << 23
        bits = tl.where(bits == 0, 1 << 22, bits)
    else:
        bits = tl.load(scales.to(tl.pointer_type(tl.int16)) + at).to(tl.int32)
    if HALF_SCALES & KEPT:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KEPT == 16 or KEPT >= ZEROS:
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def _zero(scales, at, KEPT: tl.constexpr):
    """Zero points as float32, where there are any."""
    if KEPT >= ZEROS:
        return (tl.load(scales + at) >> 16).to(tl.float32)
    else:
        return at
