"""bf16 in 12 bits without loss: sign and mantissa in 8, the exponent's place in a window in 4.

Weights of one tensor share a few exponents. A window of 15 of them gets the codes 1 to 15; code 0
says that the value is among the block's exceptions, which are kept as they are. (The idea of a
table of frequent exponents is that of DFloat11, arXiv 2504.11651, and ZipNN, arXiv 2411.05239; the
fixed width is for a kernel that decodes at the speed of the link.)

A block of 8192 values is 3072 int32 words and the words of its exceptions. So that a kernel needs
no shuffle, its output words are taken as `[4, 1024]`: word (j, m) is made from the bytes 2 (j % 2)
and 2 (j % 2) + 1 of word m in plane j // 2 of two, and from byte j of word m in the plane of codes,
the first value's code in the low half. An exception is its position in the block above 16 bits of
value; -1 fills the room up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hotexperts.kernels.gather.packing import PACKED12

PLANE_WORDS = 1024
BLOCK_VALUES = 8 * PLANE_WORDS
NUM_CODES = 15
ROOMS = (16, 32, 64, 128)  # words for the exceptions of a block; the last is 1.6 % of its values


@dataclass(frozen=True, slots=True)
class Packed12:
    """How a tensor is packed: see `packing.Packing`.

    Attributes:
        base: -1 to 240; code c from 1 to 15 is exponent base + c.
        room: exceptions that a block has room for, one of `ROOMS`.
    """

    base: int
    room: int

    block_words = BLOCK_VALUES // 2

    @property
    def form(self) -> tuple[int, ...]:
        """The kind, and the room."""
        return PACKED12, self.room

    def num_words(self, num_values: int) -> int:
        """Int32 words of so many values; the last block is filled up."""
        return -(-num_values // BLOCK_VALUES) * (3 * PLANE_WORDS + self.room)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """See `pack`."""
        return pack(values, self)

    def unpack(self, words: torch.Tensor, num_values: int) -> torch.Tensor:
        """See `unpack`."""
        return unpack(words, self, num_values)


def exponents(values: torch.Tensor) -> torch.Tensor:
    """How often each of the 256 exponents occurs in bf16 values, int64 on their device."""
    found = (values.contiguous().view(torch.int16).flatten() >> 7) & 0xFF
    return torch.bincount(found.to(torch.uint8), minlength=256)


def window(counts: torch.Tensor) -> int:
    """The base whose window holds the most of what was counted."""
    sums = torch.cat([counts.new_zeros(1), counts]).cpu().cumsum(0)
    return int((sums[NUM_CODES:] - sums[:-NUM_CODES]).argmax()) - 1


def most_exceptions(values: torch.Tensor, base: int) -> int:
    """Exceptions in the block that has most, of bf16 `[rows, n]`."""
    return int((_codes(_in_blocks(values, base), base) == 0).sum(-1).max())


def pack(values: torch.Tensor, packing: Packed12) -> torch.Tensor:
    """Pack bf16 `[rows, n]` into int32 `[rows, num_words]`, on the same device.

    A block's exceptions must fit its room: see `most_exceptions`.
    """
    blocks = _in_blocks(values, packing.base)  # [rows, blocks, values], int16
    codes = _codes(blocks, packing.base)
    shape = (*blocks.shape[:2], 4, PLANE_WORDS, 2)
    signed = (((blocks >> 8) & 0x80) | (blocks & 0x7F)).to(torch.uint8).view(shape)
    planes = [_bytes_of(signed[:, :, 2 * i : 2 * i + 2]) for i in range(2)]
    nibbles = codes.to(torch.uint8).view(shape)
    planes.append(_bytes_of((nibbles[..., 0] | (nibbles[..., 1] << 4)).unsqueeze(-1)))
    planes.append(_exceptions(blocks, codes == 0, packing.room))
    return torch.cat(planes, dim=2).flatten(1)


def unpack(words: torch.Tensor, packing: Packed12, num_values: int) -> torch.Tensor:
    """The bf16 values `[rows, num_values]` that int32 `[rows, num_words]` holds."""
    blocks = words.unflatten(1, (-1, 3 * PLANE_WORDS + packing.room))
    planes = blocks[..., : 3 * PLANE_WORDS].unflatten(-1, (3, PLANE_WORDS))
    out = []
    for j in range(4):
        for i in range(2):
            signed = (planes[:, :, j // 2] >> (16 * (j % 2) + 8 * i)) & 0xFF
            code = (planes[:, :, 2] >> (8 * j + 4 * i)) & 0xF
            out.append(((signed & 0x80) << 8) | ((packing.base + code) << 7) | (signed & 0x7F))
    values = torch.stack(out, dim=2).unflatten(2, (4, 2)).transpose(3, 4).flatten(2)
    kept = blocks[..., 3 * PLANE_WORDS :]
    block, place = (kept >= 0).flatten(0, 1).nonzero(as_tuple=True)
    entry = kept.flatten(0, 1)[block, place]
    values.view(-1, BLOCK_VALUES)[block, (entry >> 16).long()] = entry & 0xFFFF
    flat = values.flatten(1)[:, :num_values]
    return flat.to(torch.int16).view(torch.bfloat16)


def _in_blocks(values: torch.Tensor, base: int) -> torch.Tensor:
    """Their bits, int16 `[rows, blocks, values]`, the last block filled up from the window."""
    bits = values.contiguous().view(torch.int16)
    missing = -bits.shape[1] % BLOCK_VALUES
    if missing:
        bits = torch.nn.functional.pad(bits, (0, missing), value=(base + 1) << 7)
    return bits.unflatten(1, (-1, BLOCK_VALUES))


def _codes(blocks: torch.Tensor, base: int) -> torch.Tensor:
    code = ((blocks >> 7) & 0xFF) - base
    return torch.where((code > 0) & (code <= NUM_CODES), code, 0)


def _bytes_of(parts: torch.Tensor) -> torch.Tensor:
    """Uint8 `[rows, blocks, j, words, i]`, four bytes a word, as int32 `[rows, blocks, words]`."""
    return parts.transpose(2, 3).flatten(3).contiguous().view(torch.int32).squeeze(-1)


def _exceptions(blocks: torch.Tensor, is_exception: torch.Tensor, room: int) -> torch.Tensor:
    flat = is_exception.flatten(0, 1)
    entries = torch.full((len(flat), room), -1, dtype=torch.int32, device=blocks.device)
    block, place = flat.nonzero(as_tuple=True)
    number = flat.cumsum(1, dtype=torch.int32)[block, place] - 1
    value = blocks.flatten(0, 1)[block, place].int() & 0xFFFF
    entries[block, number.long()] = (place.int() << 16) | value
    return entries.view(*blocks.shape[:2], room)
