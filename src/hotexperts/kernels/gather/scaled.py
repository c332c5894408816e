"""Small numbers with a scale for every few of them: fp8, int8, int4 and mxfp4 as they lie in a row.

A matrix `[rows, columns]` is cut into tiles. A tile is the words of its codes and the words of its
scales, so that a kernel reads both once and in one stretch, and there are no partial tiles. So that
it needs no shuffle, a tile's rows are taken in as many parts as a word makes words of a slot, two
of 8-bit codes or four of 4-bit ones: word m of the codes makes word m of each part, the part's
number says from which bytes, and the low byte or half comes first.

A value is the code's number times its scale, both as float32, rounded to the slot's dtype. Where
scales have zero points, an int16 beside each, that is first taken from the number, which is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hotexperts.kernels.gather.codes import (
    E4M3,
    INT4,
    INT8,
    bits_of_scales,
    codes_of_words,
    numbers,
    scales_of_bits,
    words_of_codes,
)
from hotexperts.kernels.gather.packing import SCALED

MOST_CODE_WORDS = 1024  # of a tile: sixteen bytes for each of 256 threads
MOST_COLUMNS = 128  # of a tile
E4M3_MAX = 448.0
HALF_SCALES, ZEROS = 64, 128  # added to a form's bits of a scale


@dataclass(frozen=True, slots=True)
class Scaled:
    """How a tensor lies as codes and scales: see `packing.Packing`.

    Attributes:
        code: INT8, E4M3, INT4 or E2M1.
        rows: of the matrix.
        columns: of the matrix.
        group_rows: rows that share a scale, a power of two.
        group_columns: columns that share it, a power of two.
        scale_bits: 32, 16 or 8 of a scale's float32 are kept: all, bf16, or the exponent alone.
        dtype: of the slot, torch.bfloat16 or torch.float16.
        has_half_scales: 16 bits of a scale are fp16, not bf16.
        has_zeros: each scale, of 16 bits, has a zero point.
    """

    code: int
    rows: int
    columns: int
    group_rows: int
    group_columns: int
    scale_bits: int
    dtype: torch.dtype
    has_half_scales: bool = False
    has_zeros: bool = False

    base = 0

    def __post_init__(self) -> None:
        is_otherwise = self.has_half_scales or self.has_zeros
        assert self.scale_bits == 16 or not is_otherwise, "of scales of 16 bits"
        assert self.group_columns > 1 or not self.has_zeros, "kernels look for them in rows"

    @property
    def code_bits(self) -> int:
        """Bits of a code."""
        return 8 if self.code <= E4M3 else 4

    @property
    def num_parts(self) -> int:
        """Parts of a tile's rows."""
        return 16 // self.code_bits

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        most = MOST_CODE_WORDS * 32 // self.code_bits
        limit = self.group_columns if self.group_columns > 1 else MOST_COLUMNS
        columns = min(power_of_two_in(self.columns), limit, MOST_COLUMNS)
        limit = most // columns
        if self.group_columns == 1:  # the rows of a part share their scales
            limit = min(limit, self.num_parts * self.group_rows)
        return min(power_of_two_in(self.rows), limit), columns

    @property
    def is_possible(self) -> bool:
        """Whether tiles cover the matrix, and their rows can be taken in parts."""
        rows, columns = self.tile if self.rows and self.columns else (0, 0)
        return rows >= self.num_parts and columns >= 8

    @property
    def block_words(self) -> int:
        """Words of a slot that a tile makes."""
        rows, columns = self.tile
        return rows * columns // 2

    @property
    def num_code_words(self) -> int:
        """Words of a tile's codes."""
        return self.block_words // self.num_parts

    @property
    def num_tile_words(self) -> int:
        """Words of a tile: codes, and scales filled up to sixteen bytes."""
        rows, columns = self._scales_of_tile
        bits = 32 if self.has_zeros else self.scale_bits
        return self.num_code_words + 4 * -(-rows * columns * bits // 128)

    @property
    def form(self) -> tuple[int, ...]:
        """What a kernel is compiled for."""
        is_bf16 = self.dtype == torch.bfloat16
        scales = self.scale_bits + HALF_SCALES * self.has_half_scales + ZEROS * self.has_zeros
        groups = self.group_rows, self.group_columns, scales, int(is_bf16)
        return SCALED, self.code, *self.tile, self.columns, *groups, self.num_tile_words

    @property
    def _scales_of_tile(self) -> tuple[int, int]:
        rows, columns = self.tile
        return max(1, rows // self.group_rows), max(1, columns // self.group_columns)

    @property
    def _tiles(self) -> tuple[int, int]:
        rows, columns = self.tile
        return self.rows // rows, self.columns // columns

    def num_words(self, num_values: int) -> int:
        """Words of the matrix in a row."""
        assert num_values == self.rows * self.columns, "a matrix of another size"
        return num_values // (2 * self.block_words) * self.num_tile_words

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """The nearest codes for `[n, num_values]`; see `quantise`."""
        return self.encode(*self.quantise(values))

    def quantise(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales: a group's largest value gets the largest code.

        Args:
            values: 16-bit `[n, num_values]`.

        Returns:
            Codes, uint8 `[n, rows, columns]`, and scales, float32
            `[n, rows / group_rows, columns / group_columns]`, which `scale_bits` hold.
        """
        assert self.scale_bits >= 16, "exponents alone are no scales to choose"
        is_otherwise = self.has_half_scales or self.has_zeros
        assert not is_otherwise, "only checkpoints have such scales"
        groups = values.view(
            len(values),
            self.rows // self.group_rows,
            self.group_rows,
            self.columns // self.group_columns,
            self.group_columns,
        ).float()
        largest = {INT8: 127.0, INT4: 7.0, E4M3: E4M3_MAX}[self.code]
        scales = groups.abs().amax(dim=(2, 4)) / largest
        if self.scale_bits == 16:
            scales = scales.bfloat16().float()
        divisor = torch.where(scales == 0, 1, scales)[:, :, None, :, None]
        # A scale that was rounded down makes the largest value a little larger than its code.
        steps = (groups / divisor).clamp(-largest, largest)
        if self.code == E4M3:
            codes = steps.to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            codes = steps.round().to(torch.int8).view(torch.uint8)
            codes &= (1 << self.code_bits) - 1
        return codes.view(len(values), self.rows, self.columns), scales

    def encode(
        self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Lay codes and scales out.

        Args:
            codes: uint8 `[n, rows, columns]`; of 4-bit ones the low half counts.
            scales: float32 `[n, rows / group_rows, columns / group_columns]`.
            zeros: int16 of the same shape, where there are any.

        Returns:
            Int32 `[n, num_words]`.
        """
        words = words_of_codes(self._by_tile(codes, self.tile), self.code_bits)
        kept = bits_of_scales(
            self._scales_by_tile(scales), self.scale_bits, are_half=self.has_half_scales
        )
        assert self.has_zeros == (zeros is not None), "zero points, or none"
        if zeros is not None:
            both = kept.view(torch.int16), self._scales_by_tile(zeros)
            kept = torch.stack(both, dim=-1).flatten(-2).view(torch.uint8)
        room = 4 * (self.num_tile_words - self.num_code_words)
        kept = torch.nn.functional.pad(kept, (0, room - kept.shape[-1]))
        return torch.cat([words, kept.view(torch.int32)], dim=-1).flatten(1)

    def unpack(self, words: torch.Tensor, num_values: int) -> torch.Tensor:
        """The values `[n, num_values]` that int32 `[n, num_words]` makes."""
        assert num_values == self.rows * self.columns, "a matrix of another size"
        tiles = words.unflatten(1, (-1, self.num_tile_words))
        codes = codes_of_words(tiles[..., : self.num_code_words], self.code_bits)
        kept = tiles[..., self.num_code_words :].contiguous()
        found = numbers(codes, self.code)
        if self.has_zeros:
            pairs = kept.view(torch.int16).unflatten(-1, (-1, 2))
            kept = pairs[..., 0].contiguous()
            found = found - self._of_every_value(pairs[..., 1].float())
        scales = scales_of_bits(kept, self.scale_bits, are_half=self.has_half_scales)
        values = (found * self._of_every_value(scales)).unflatten(-1, self.tile)
        matrix = values.unflatten(1, self._tiles).transpose(2, 3)
        return matrix.reshape(len(words), num_values).to(self.dtype)

    def _of_every_value(self, of_groups: torch.Tensor) -> torch.Tensor:
        """`[..., scales of a tile and more]` as `[..., values of a tile]`."""
        grid = self._scales_of_tile
        found = of_groups[..., : grid[0] * grid[1]].unflatten(-1, grid)
        repeats = self.tile[0] // grid[0], self.tile[1] // grid[1]
        return found.repeat_interleave(repeats[0], -2).repeat_interleave(repeats[1], -1).flatten(-2)

    def _scales_by_tile(self, scales: torch.Tensor) -> torch.Tensor:
        """`[n, tiles, scales of a tile]`; a group larger than a tile is in several of them."""
        return self._by_tile(self._spread(scales), self._scales_of_tile)

    def _spread(self, scales: torch.Tensor) -> torch.Tensor:
        """As many as tiles have: `[n, tiles * scales of a tile, ...]`."""
        wanted = [t * s for t, s in zip(self._tiles, self._scales_of_tile, strict=True)]
        for dim, count in enumerate(wanted, start=1):
            scales = scales.repeat_interleave(count // scales.shape[dim], dim)
        return scales

    def _by_tile(self, matrix: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
        """`[n, rows, columns]` as `[n, tiles, values of a tile]`."""
        rows, columns = self._tiles
        cut = matrix.reshape(len(matrix), rows, tile[0], columns, tile[1])
        return cut.transpose(2, 3).reshape(len(matrix), rows * columns, -1)


def by_row(
    code: int, shape: tuple[int, ...], group: int, scale_bits: int, dtype: torch.dtype
) -> Scaled | None:
    """Groups of consecutive values of a row, at most so many; None where there are none.

    Args:
        code: INT8, E4M3, INT4 or E2M1.
        shape: of an expert's tensor; its last dimension is a row.
        group: a power of two.
        scale_bits: as for `Scaled`.
        dtype: of the slot.
    """
    group = min(group, power_of_two_in(shape[-1])) if shape and shape[-1] else 0
    if group < 8:
        return None
    found = Scaled(code, _count(shape) // group, group, 1, group, scale_bits, dtype)
    return found if found.is_possible else None


def power_of_two_in(number: int) -> int:
    """The largest that divides it."""
    return number & -number


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
