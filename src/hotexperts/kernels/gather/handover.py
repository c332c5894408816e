"""Whose turn it is between a program of a prefetch and the same program of the plan it is for.

One thread asks the word and tells the others: each for itself would see it at another time, and
count part of a block as copied that never was. See `AheadRows`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hotexperts.kernels.gather.ahead import Turn

ASKED: tl.constexpr = tl.constexpr(int(Turn.ASKED))
RUNNING: tl.constexpr = tl.constexpr(int(Turn.RUNNING))
DONE: tl.constexpr = tl.constexpr(int(Turn.DONE))


@triton.jit
def begin(turn, before, layer):
    """Whether the layer's rows may come now: the plan of the layer `before` was the last one."""
    found = tl.atomic_cas(turn, 4 * before + ASKED, 4 * layer + RUNNING, sem="acq_rel")
    return found == 4 * before + ASKED


@triton.jit
def may_run(turn, layer):
    """Whether nobody asked for the layer since."""
    return tl.atomic_or(turn, 0, sem="relaxed") == 4 * layer + RUNNING


@triton.jit
def end(turn, layer):
    """What this program wrote is there for the plan's."""
    tl.debug_barrier()
    tl.atomic_xchg(turn, 4 * layer + DONE, sem="release")


@triton.jit
def ask(turn, layer):
    """The plan begins; returns what the word was."""
    return tl.atomic_xchg(turn, 4 * layer + ASKED, sem="acq_rel")


@triton.jit
def wait_for_end(turn, found, layer):
    """Whether rows were copied for the layer; where they still are, once they are no more.

    Who runs is on the GPU already, and looks at the word after every block.
    """
    if found == 4 * layer + RUNNING:
        while found != 4 * layer + DONE:
            found = tl.atomic_or(turn, 0, sem="acquire")
        tl.atomic_xchg(turn, 4 * layer + ASKED, sem="relaxed")
    return found == 4 * layer + DONE
