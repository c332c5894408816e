"""What ADV's shadows would have hit, counted beside its decisions."""

from __future__ import annotations

import random

from hotexperts.policy.adv import SHADOWS
from hotexperts.policy.shadow import ShadowHits
from hotexperts.types import Decision
from policy.replay import Replay


def test_shadow_hits_by_hand() -> None:
    # As in test_scores: A and B were used for long, 40 hits; then C, D, C. The shadow with the
    # fast average alone hits at the second C, and so does LRU; ADV follows too late to hit.
    replay = Replay("adv", 2)
    replay.calls("AB " * 21 + "C D C")
    found = replay.policy.shadow_hits()
    assert found == ShadowHits(45, 40, 41, (41, 40, 40, 40, 40, 40, 40))
    assert found.regret == 1


def test_regret_is_negative_where_the_real_cache_is_the_best() -> None:
    assert ShadowHits(9, 5, 3, (4, 2)).regret == -1
    assert ShadowHits(9, 5, 6, (4, 2)).regret == 1


def test_shadow_hits_are_those_of_caches_of_their_own() -> None:
    draw = random.Random(0)
    adv = Replay("adv", 5, num_experts=12)
    others = [Replay("auto", 5, num_experts=12, a=a, df=df, ds=ds) for a, df, ds in SHADOWS]
    others.append(Replay("lru", 5, num_experts=12))
    demands, hits = 0, [0] * (len(others) + 1)
    for _ in range(300):
        letters = "".join(draw.choices("ABCDEFGHIJKL", range(1, 13), k=draw.randint(0, 9)))
        evict = draw.random() < 0.9
        demands += len(set(letters))
        for i, replay in enumerate([*others, adv]):
            hits[i] += len(set(letters)) - num_missed(replay.decide(letters, evict=evict))
        held = adv.policy.lru_shadow.order
        assert sorted(held) == sorted(others[-1].ledger.residents)
    found = adv.policy.shadow_hits()
    assert found == ShadowHits(demands, hits[-1], hits[-2], tuple(hits[:-2]))


def test_a_reset_forgets_shadow_hits() -> None:
    replay = Replay("adv", 2)
    replay.calls("A A B")
    replay.policy.reset()
    assert replay.policy.shadow_hits() == ShadowHits(0, 0, 0, (0,) * len(SHADOWS))


def num_missed(found: Decision) -> int:
    return len(found.admitted) + len(found.bypassed)
