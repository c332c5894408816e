"""The plan on tensors, one operation at a time: what the kernel must equal bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hotexperts.kernels.plan import rules
from hotexperts.kernels.plan.layout import (
    BYPASSING_POLICIES,
    NOWHERE,
    Counter,
    PlanLayout,
    Scalar,
    may_bypass,
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
    num_waves: int = 1,
) -> Plan:
    """One event; changes `state` and `counters` in place.

    Args:
        layout: offsets in the state.
        state: int32 `[layout.num_words]`.
        counters: int64 `[NUM_COUNTERS]`.
        topk_ids: ids of any shape, row-major; -1 is ignored.
        num_valid_ids: ids from this position on are padding: ignored, and remapped to slot 0, which
            exists; None: all count.
        evict: False admits into free slots only.
        max_bypassed: as for `Policy.decide`.
        num_waves: what to add to the counter of waves.
    """
    num_experts = layout.num_experts
    ids = topk_ids.flatten().long().clone()
    if num_valid_ids is not None:
        ids[num_valid_ids:] = NOWHERE
    counts = torch.bincount(ids[ids >= 0], minlength=num_experts)
    demanded = counts > 0
    slot_of, expert_of = layout.view(state, "slot_of"), layout.view(state, "expert_of")
    resident = slot_of >= 0
    score, tie = _record(layout, state, counters, counts, evict=evict)
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
    _note_passed(layout, state, misses[~torch.isin(misses, admitted)])
    for counter, amount in {
        Counter.CALLS: 1,
        Counter.HITS: num_demanded - len(misses),
        Counter.MISSES: len(misses),
        Counter.BYPASSES: len(misses) - len(admitted),
        Counter.EVICTIONS: len(victims),
        Counter.WAVES: num_waves,
        Counter.COPIES: len(admitted),
    }.items():
        counters[counter] += amount
    remapped = torch.where(ids >= 0, slot_of.long()[ids.clamp(min=0)], NOWHERE)
    if num_valid_ids is not None:
        remapped[num_valid_ids:] = 0
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
    if layout.policy not in BYPASSING_POLICIES:
        return misses[: num_free + len(candidates)]
    ranked = misses[score[misses].argsort(descending=True, stable=True)]
    challengers = ranked[num_free : num_free + len(candidates)]
    swaps = len(challengers)
    if may_bypass(layout.policy, num_demanded, layout.capacity):
        wins = int((score[challengers] > score[candidates[:swaps]]).sum())
        swaps = max(wins, swaps - max_bypassed)
    return ranked[: num_free + swaps].sort().values


def _note_passed(layout: PlanLayout, state: torch.Tensor, passed: torch.Tensor) -> None:
    view = layout.view(state, "passed")
    view.fill_(NOWHERE)
    view[passed] = torch.arange(len(passed), dtype=torch.int32)


def _record(
    layout: PlanLayout,
    state: torch.Tensor,
    counters: torch.Tensor,
    counts: torch.Tensor,
    *,
    evict: bool,
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
        count[demanded] += rules.ONE_USE if policy == "lfu" else 1
        if policy == "lfu":
            state[Scalar.USES] += demanded.sum().int()
            if state[Scalar.USES] >= rules.AGEING_PERIOD_PER_SLOT * layout.capacity:
                count >>= 1
                state[Scalar.USES] = 0
            return count.clone(), last_use.clone()
        age = now - last_use
        if policy == "lfru":
            return count.float() / (age + 1).float(), no_tie
        table = rules.lcp_table()
        return (count.float() + rules.LCP_UNUSED) * table[age.clamp(max=len(table) - 1)], no_tie
    if policy == "ewma":
        score = layout.view(state, "score").view(torch.float32)
        _decay(score, rules.EWMA_DECAY, 1.0, demanded.float())
        return score.clone(), no_tie
    if policy == "adv":
        return _record_adv(layout, state, counters, counts, now, evict=evict), no_tie
    fast = layout.view(state, "fast").view(torch.float32)
    slow = layout.view(state, "slow").view(torch.float32)
    use = counts.float().sqrt()
    _decay(fast, *rules.AUTO_FAST, use)
    _decay(slow, *rules.AUTO_SLOW, use)
    return (rules.AUTO_MIX[0] * fast) + (rules.AUTO_MIX[1] * slow), no_tie


def _record_adv(
    layout: PlanLayout,
    state: torch.Tensor,
    counters: torch.Tensor,
    counts: torch.Tensor,
    now: int,
    *,
    evict: bool,
) -> torch.Tensor:
    """Advance the averages, judge and move the shadows, and mix the chosen one's score."""
    use, demanded = counts.float().sqrt(), counts > 0
    averages = []
    for i, (decay, weight) in enumerate(rules.ADV_AVERAGES):
        averages.append(layout.view(state, f"average_{i}").view(torch.float32))
        _decay(averages[-1], decay, weight, use)
    scores = [
        (a * averages[fast]) + (b * averages[slow])
        for (a, b), fast, slow in zip(
            rules.ADV_MIX, rules.ADV_FAST_ROW, rules.ADV_SLOW_ROW, strict=True
        )
    ]
    parity = now % 2
    held = [layout.view(state, f"held_{parity}_{j}") > 0 for j in range(rules.NUM_PLAYED)]
    worth = state[Scalar.WORTH : Scalar.WORTH + rules.NUM_PLAYED].view(torch.float32)
    hits = torch.stack([(h & demanded).sum() for h in held])
    counters[Counter.SHADOW_HITS : Counter.LRU_HITS + 1] += hits
    _decay(worth, rules.ADV_DISCOUNT, 1.0, hits.float())
    own_hits = (demanded & (layout.view(state, "slot_of") >= 0)).sum()
    regret = state[Scalar.REGRET : Scalar.REGRET + 1].view(torch.float32)
    regret.mul_(rules.ADV_LONG_DISCOUNT).add_((hits[-1] - own_hits).float())
    regret[regret.abs() < rules.SMALLEST] = 0
    last_use = layout.view(state, "last_use")
    last_use[demanded] = now
    limits = [layout.num_experts] * rules.NUM_SHADOWS + [0]  # LRU lets nobody pass by
    scores.append(last_use)
    for j, (shadow, score) in enumerate(zip(held, scores, strict=True)):
        moved = _move_shadow(layout, shadow, score, demanded, limits[j], evict=evict)
        layout.view(state, f"held_{1 - parity}_{j}").copy_(moved)
    if regret > rules.ADV_MOST_REGRET * demanded.sum().float():
        return last_use.clone()
    best = int((worth == worth.max()).nonzero()[0])
    home = worth[rules.ADV_HOME]
    return scores[best if worth[best] > home * rules.ADV_MARGIN else rules.ADV_HOME].clone()


def _move_shadow(
    layout: PlanLayout,
    shadow: torch.Tensor,
    score: torch.Tensor,
    demanded: torch.Tensor,
    max_bypassed: int,
    *,
    evict: bool,
) -> torch.Tensor:
    misses = (demanded & ~shadow).nonzero().flatten()
    free = layout.capacity - int(shadow.sum())
    leaving = (shadow & ~demanded).nonzero().flatten()
    candidates = _ordered(leaving, score, torch.zeros_like(score)) if evict else leaving[:0]
    num_demanded = int(demanded.sum())
    admitted = _admit(layout, misses, candidates, free, score, num_demanded, max_bypassed)
    moved = shadow.clone()
    moved[candidates[: max(0, len(admitted) - free)]] = False
    moved[admitted] = True
    return moved


def _decay(values: torch.Tensor, decay: float, weight: float, use: torch.Tensor) -> None:
    """Values = (decay * values) + (weight * use), each operation rounded; tiny ones become 0."""
    values.mul_(decay)
    values.add_(use * weight)
    values[values < rules.SMALLEST] = 0
