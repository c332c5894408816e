"""Codes and scales as bits: what each stands for, and how words hold them."""

from __future__ import annotations

import torch

INT8, E4M3, INT4, E2M1 = 0, 1, 2, 3  # codes, as kernels know them: 8 bits first
CODE_NAMES = ("int8", "fp8", "int4", "mxfp4")
HALF_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12)  # of e2m1, twice as large as they are


def numbers(codes: torch.Tensor, code: int) -> torch.Tensor:
    """What codes, uint8, stand for: float32."""
    if code == E4M3:
        return codes.view(torch.float8_e4m3fn).float()
    if code == INT8:
        return codes.view(torch.int8).float()
    if code == INT4:
        return (((codes & 0xF) ^ 8).to(torch.int8) - 8).float()
    halves = torch.tensor(HALF_NUMBERS, dtype=torch.float32, device=codes.device) / 2
    return torch.cat([halves, -halves])[(codes & 0xF).long()]


def words_of_codes(tiles: torch.Tensor, code_bits: int) -> torch.Tensor:
    """Codes of tiles, uint8 `[..., values]`, as int32 words."""
    pairs = tiles.unflatten(-1, (16 // code_bits, -1, 2))
    if code_bits == 4:
        pairs = ((pairs[..., 0] & 0xF) | (pairs[..., 1] << 4)).unsqueeze(-1)
    return pairs.transpose(-3, -2).contiguous().flatten(-3).view(torch.int32)


def codes_of_words(words: torch.Tensor, code_bits: int) -> torch.Tensor:
    """The reverse."""
    found = (
        words.contiguous().view(torch.uint8).unflatten(-1, (-1, 16 // code_bits, code_bits // 4))
    )
    if code_bits == 4:
        found = torch.cat([found & 0xF, found >> 4], dim=-1)
    return found.transpose(-3, -2).flatten(-3)


def bits_of_scales(
    scales: torch.Tensor, scale_bits: int, *, are_half: bool = False
) -> torch.Tensor:
    """Float32 `[..., s]` as uint8 `[..., s * scale_bits / 8]`; 16 bits are bf16, or fp16."""
    if are_half:
        return scales.contiguous().half().view(torch.uint8)
    bits = scales.contiguous().view(torch.int32)
    if scale_bits == 8:
        return (bits >> 23).to(torch.uint8)
    kept = bits if scale_bits == 32 else (bits >> 16).to(torch.int16)
    return kept.view(torch.uint8)


def scales_of_bits(words: torch.Tensor, scale_bits: int, *, are_half: bool = False) -> torch.Tensor:
    """Words, or any integers, as the float32 they hold."""
    if are_half:
        return words.view(torch.float16).float()
    if scale_bits == 32:
        return words.view(torch.float32)
    if scale_bits == 16:
        return words.view(torch.bfloat16).float()
    return exponents(words.view(torch.uint8))


def exponents(stored: torch.Tensor) -> torch.Tensor:
    """Powers of two from their bytes, biased by 127: float32."""
    bits = stored.int() << 23
    return torch.where(bits == 0, 1 << 22, bits).view(torch.float32)
