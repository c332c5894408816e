"""How often each expert is asked for: by every program of a plan alone, or by many before it."""

# ruff: noqa: N803 (kernel constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_ids(topk_ids, first, stride, limit, o_e, BLOCK_N: tl.constexpr):
    """Uses of each expert, int32 `[BLOCK_E]`, in blocks `first`, `first + stride`, ... of ids."""
    counts = tl.zeros_like(o_e)
    for begin in range(first, limit, stride):
        o_n = begin + tl.arange(0, BLOCK_N)
        b_ids = tl.load(topk_ids + o_n, mask=o_n < limit, other=-1).to(tl.int32)
        counts += tl.sum((b_ids[None, :] == o_e[:, None]).to(tl.int32), axis=1)
    return counts


@triton.jit
def num_counted(num_valid_tokens, num_ids, top_k, HAS_NUM_VALID: tl.constexpr):
    """Ids from this position on are padding."""
    limit = num_ids
    if HAS_NUM_VALID:
        limit = tl.minimum(limit, tl.load(num_valid_tokens) * top_k)
    return limit


@triton.jit(do_not_specialize=["num_ids", "top_k"])
def count_kernel(
    topk_ids,  # [N], int32 or int64
    num_valid_tokens,  # int32 [1], read if HAS_NUM_VALID
    counts,  # int32 [E], zero before
    num_ids,
    top_k,
    NUM_EXPERTS: tl.constexpr,
    HAS_NUM_VALID: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the uses of each expert to `counts`; every program takes its share of the ids."""
    o_e = tl.arange(0, BLOCK_E)
    limit = num_counted(num_valid_tokens, num_ids, top_k, HAS_NUM_VALID)
    first, stride = tl.program_id(0) * BLOCK_N, tl.num_programs(0) * BLOCK_N
    found = count_ids(topk_ids, first, stride, limit, o_e, BLOCK_N)
    tl.atomic_add(counts + o_e, found, mask=(o_e < NUM_EXPERTS) & (found > 0), sem="relaxed")
