"""The plan on tensors, one operation at a time: what the kernel must equal bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hotexperts.kernels.plan.layout import NOWHERE, Counter, PlanLayout, Scalar
from hotexperts.kernels.plan.rules import (
    AGEING_PERIOD_PER_SLOT,
    AUTO_FAST,
    AUTO_MIX,
    AUTO_SLOW,
    EWMA_DECAY,
    LCP_UNUSED,
    ONE_USE,
    SMALLEST,
    lcp_table,
)


class Plan(NamedTuple):
    """What one event asks for.

    Attributes:
        remapped: slots for ids, -1 where the pair is not served by the slots.
        experts: int64, experts to copy, ascending.
        slots: int64, where to; same order.
    """

    remapped: torch.Tensor
    experts: torch.Tensor
    slots: torch.Tensor


def plan(
    layout: PlanLayout,
    state: torch.Tensor,
    counters: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    num_valid_ids: int | None = None,
    evict: bool = True,
    max_bypassed: int = 0,
) -> Plan:
    """One event; changes `state` and `counters` in place.

    Args:
        layout: offsets in the state.
        state: int32 `[layout.num_words]`.
        counters: int64 `[NUM_COUNTERS]`.
        topk_ids: ids of any shape, row-major; -1 is ignored.
        num_valid_ids: ids from this position on are padding and ignored; None: all count.
        evict: False admits into free slots only.
        max_bypassed: as for `Policy.decide`.
    """
    num_experts = layout.num_experts
    ids = topk_ids.flatten().long().clone()
    if num_valid_ids is not None:
        ids[num_valid_ids:] = NOWHERE
    counts = torch.bincount(ids[ids >= 0], minlength=num_experts)
    demanded = counts > 0
    slot_of, expert_of = layout.view(state, "slot_of"), layout.view(state, "expert_of")
    resident = slot_of >= 0
    score, tie = _record(layout, state, counts)
    misses = (demanded & ~resident).nonzero().flatten()
    free = (expert_of < 0).nonzero().flatten()
    leaving = _ordered((resident & ~demanded).nonzero().flatten(), score, tie)
    candidates = leaving if evict and len(misses) > len(free) else leaving[:0]
    num_demanded = int(demanded.sum())
    admitted = _admit(layout, misses, candidates, len(free), score, num_demanded, max_bypassed)
    num_victims = max(0, len(admitted) - len(free))
    victims = candidates[:num_victims]
    slots = torch.cat([free[: len(admitted)], slot_of[victims].long()])[: len(admitted)]
    slot_of[victims] = NOWHERE
    slot_of[admitted] = slots.int()
    expert_of[slots] = admitted.int()
    _note_passed(layout, state, misses, admitted)
    for counter, amount in {
        Counter.CALLS: 1,
        Counter.HITS: num_demanded - len(misses),
        Counter.MISSES: len(misses),
        Counter.BYPASSES: len(misses) - len(admitted),
        Counter.EVICTIONS: len(victims),
        Counter.WAVES: 1,
    }.items():
        counters[counter] += amount
    remapped = torch.where(ids >= 0, slot_of.long()[ids.clamp(min=0)], NOWHERE)
    return Plan(remapped.view(topk_ids.shape).to(topk_ids.dtype), admitted, slots)


def _ordered(experts: torch.Tensor, score: torch.Tensor, tie: torch.Tensor) -> torch.Tensor:
    """By score, then `tie`, then id, all ascending."""
    experts = experts[tie[experts].argsort(stable=True)]
    return experts[score[experts].argsort(stable=True)]


def _admit(
    layout: PlanLayout,
    misses: torch.Tensor,
    candidates: torch.Tensor,
    num_free: int,
    score: torch.Tensor,
    num_demanded: int,
    max_bypassed: int,
) -> torch.Tensor:
    if layout.policy != "auto":
        return misses[: num_free + len(candidates)]
    ranked = misses[score[misses].argsort(descending=True, stable=True)]
    challengers = ranked[num_free : num_free + len(candidates)]
    swaps = len(challengers)
    if 10 * num_demanded > 6 * layout.capacity:
        wins = int((score[challengers] > score[candidates[:swaps]]).sum())
        swaps = max(wins, swaps - max_bypassed)
    return ranked[: num_free + swaps].sort().values


def _note_passed(
    layout: PlanLayout, state: torch.Tensor, misses: torch.Tensor, admitted: torch.Tensor
) -> None:
    passed = misses[~torch.isin(misses, admitted)]
    view = layout.view(state, "passed")
    view.fill_(NOWHERE)
    view[passed] = torch.arange(len(passed), dtype=torch.int32)


def _record(
    layout: PlanLayout, state: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance the policy by one event; its score and, for equal scores, a second key."""
    policy, now = layout.policy, int(state[Scalar.CLOCK])
    demanded = counts > 0
    state[Scalar.CLOCK] += 1
    no_tie = torch.zeros_like(counts)
    if policy in ("lru", "lfu", "lfru", "lcp"):
        last_use = layout.view(state, "last_use")
        last_use[demanded] = now
        if policy == "lru":
            return last_use.clone(), no_tie
        count = layout.view(state, "count")
        count[demanded] += ONE_USE if policy == "lfu" else 1
        if policy == "lfu":
            state[Scalar.USES] += demanded.sum().int()
            if state[Scalar.USES] >= AGEING_PERIOD_PER_SLOT * layout.capacity:
                count >>= 1
                state[Scalar.USES] = 0
            return count.clone(), last_use.clone()
        age = now - last_use
        if policy == "lfru":
            return count.float() / (age + 1).float(), no_tie
        table = lcp_table()
        return (count.float() + LCP_UNUSED) * table[age.clamp(max=len(table) - 1)], no_tie
    if policy == "ewma":
        score = layout.view(state, "score").view(torch.float32)
        _decay(score, EWMA_DECAY, 1.0, demanded.float())
        return score.clone(), no_tie
    fast = layout.view(state, "fast").view(torch.float32)
    slow = layout.view(state, "slow").view(torch.float32)
    use = counts.float().sqrt()
    _decay(fast, *AUTO_FAST, use)
    _decay(slow, *AUTO_SLOW, use)
    return (AUTO_MIX[0] * fast) + (AUTO_MIX[1] * slow), no_tie


def _decay(values: torch.Tensor, decay: float, weight: float, use: torch.Tensor) -> None:
    """Values = (decay * values) + (weight * use), each operation rounded; tiny ones become 0."""
    values.mul_(decay)
    values.add_(use * weight)
    values[values < SMALLEST] = 0
