"""Caches by scanning, and traces in letters: what `hotexperts.simulate` is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from hotexperts.simulate import Trace

Calls = list[tuple[list[int], bool]]  # the experts as listed, and whether it counts


def lettered(*sequences: str, num_experts: int = 8) -> Trace:
    """One layer; a word is a token, lower case is prefill: `lettered("ab C AC")`."""
    words = [(at, word) for at, text in enumerate(sequences) for word in text.split()]
    ids = np.full((len(words), 1, max(len(word) for _, word in words)), -1)
    for row, (_, word) in enumerate(words):
        ids[row, 0, : len(word)] = [ord(letter) - ord("A") for letter in word.upper()]
    phase = np.array([int(word.isupper()) for _, word in words])
    seq = np.array([at for at, _ in words])
    return Trace(ids, phase, seq, {"n_experts": num_experts})


def layered(*sequences: str, num_experts: int = 8) -> Trace:
    """The same with a part a layer: `layered("A/B C/DE")` has two layers, "-" asks for nothing."""
    words = [(at, word) for at, text in enumerate(sequences) for word in text.split()]
    parts = [word.replace("-", "").upper().split("/") for _, word in words]
    widest = max(len(part) for token in parts for part in token)
    ids = np.full((len(words), len(parts[0]), widest), -1)
    for row, token in enumerate(parts):
        for layer, part in enumerate(token):
            ids[row, layer, : len(part)] = [ord(letter) - ord("A") for letter in part]
    phase = np.array([int(word.isupper()) for _, word in words])
    seq = np.array([at for at, _ in words])
    return Trace(ids, phase, seq, {"n_experts": num_experts})


def pool_calls(trace: Trace) -> Calls:
    """All layers' calls at batch 1 in order, expert e of layer l as `l * num_experts + e`."""
    rows = [token for sequence in trace.sequences() for token in sequence]
    return [
        ([layer * trace.num_experts + int(e) for e in ids if e >= 0], bool(trace.phase[row]))
        for row in rows
        for layer, ids in enumerate(trace.ids[row])
        if ids.max() >= 0
    ]


def token_calls(trace: Trace, layer: int) -> Calls:
    """Batch 1 and a warm prefill: token after token, in the order of the router."""
    rows = [token for sequence in trace.sequences() for token in sequence]
    listed = ((row, [int(e) for e in trace.ids[row, layer] if e >= 0]) for row in rows)
    return [(experts, bool(trace.phase[row])) for row, experts in listed if experts]


def batched_calls(trace: Trace, layer: int, batch: int) -> Calls:
    """Lanes without prefill, by counting where each lane would be."""
    ends = [0] * batch
    at: dict[int, list[int]] = {}
    for sequence in trace.sequences():
        lane = ends.index(min(ends))
        for place, token in enumerate(sequence, start=ends[lane]):
            at.setdefault(place, []).append(token)
        ends[lane] += len(sequence)
    full = [rows for _, rows in sorted(at.items()) if len(rows) == batch]
    return [
        (sorted({int(e) for row in rows for e in trace.ids[row, layer]}), True) for rows in full
    ]


def lru_hits(calls: Calls, capacity: int, *, listed: bool = False) -> int:
    """Least recently used; of one call's experts the lower id leaves first.

    With `listed` the later one in the router's order leaves first and the earlier enters first.
    """
    hits = 0
    age: dict[int, tuple[int, int]] = {}
    for now, (experts, counts) in enumerate(calls):
        order = experts if listed else sorted(experts)
        hits += counts * sum(expert in age for expert in order)
        missed = [expert for expert in order if expert not in age]
        leaving = sorted((when, e) for e, when in age.items() if e not in order)
        for expert in missed:
            if len(age) == capacity:
                if not leaving:
                    break
                del age[leaving.pop(0)[1]]
            age[expert] = (now, 0)
        for place, expert in enumerate(order):
            if expert in age:
                age[expert] = (now, -place if listed else 0)
    return hits


def most_hits(calls: Calls, capacity: int) -> int:
    """The best over every choice of what stays, by trying them all."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for experts, _ in calls:
        after: dict[frozenset[int], int] = {}
        for cache, hits in best.items():
            for kept in _subsets(cache | set(experts), capacity):
                found = hits + len(cache & set(experts))
                after[kept] = max(after.get(kept, 0), found)
        best = after
    return max(best.values())


def most_atomic_hits(calls: Calls, capacity: int, *, forced: bool = False) -> int:
    """The best where demanded residents stay and, if forced, as many misses enter as fit."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for experts, _ in calls:
        after: dict[frozenset[int], int] = {}
        for cache, hits in best.items():
            held = cache & set(experts)
            missed = set(experts) - held
            for kept in _subsets((cache | missed) - held, capacity - len(held)):
                entered = len(kept & missed)
                if forced and entered < min(len(missed), capacity - len(held)):
                    continue
                found = hits + len(held)
                after[kept | held] = max(after.get(kept | held, 0), found)
        best = after
    return max(best.values())


def soonest_hits(calls: Calls, capacity: int) -> int:
    """Event-atomic and greedy by the next use alone, ties by id: no bound (see `bounds`)."""
    hits = 0
    cache: set[int] = set()
    for at, (experts, counts) in enumerate(calls):
        next_use = {}
        for later in range(len(calls) - 1, at, -1):
            next_use.update(dict.fromkeys(calls[later][0], later))
        held = cache & set(experts)
        hits += counts * len(held)
        others = (cache | set(experts)) - held
        ranked = sorted(others, key=lambda e, when=next_use: (when.get(e, len(calls)), e))
        cache = held | set(ranked[: capacity - len(held)])
    return hits


def scored_hits(
    calls: Calls, capacity: int, weaker_first: Callable[[int, list[list[int]]], object]
) -> int:
    """A cache that evicts by `weaker_first(expert, calls up to this one)`, ties by id."""
    hits = 0
    cache: set[int] = set()
    for at, (experts, counts) in enumerate(calls):
        past = [sorted(before) for before, _ in calls[: at + 1]]
        hits += counts * len(cache & set(experts))
        leaving = sorted(cache - set(experts), key=lambda e, p=past: (weaker_first(e, p), e))
        for expert in sorted(set(experts) - cache):
            if len(cache) == capacity:
                if not leaving:
                    break
                cache.remove(leaving.pop(0))
            cache.add(expert)
    return hits


def _subsets(experts: Sequence[int] | frozenset[int], most: int) -> list[frozenset[int]]:
    return [frozenset(c) for n in range(most + 1) for c in combinations(sorted(experts), n)]
