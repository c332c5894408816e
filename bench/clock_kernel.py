"""Reads the GPU's clock where a stream has come to, inside CUDA graphs too."""

# ruff: noqa: N803 (kernel constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["place"])
def stamp_kernel(times, place):
    """Write the nanoseconds of this GPU's clock to `times[place]`, int64."""
    tl.store(times + place, globaltimer())


@triton.jit
def clock_kernel(times, NUM_READS: tl.constexpr):
    """Write successive readings of the clock: how fine it is."""
    for i in range(NUM_READS):
        tl.store(times + i, globaltimer())
