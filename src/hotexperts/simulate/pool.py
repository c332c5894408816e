"""Policies of one pool for all layers; expert e of layer l has the id `l * layer_size + e`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

from hotexperts.policy import Policy
from hotexperts.policy.ewma import EWMA
from hotexperts.policy.lru import LRU
from hotexperts.types import Event


class Pooled(Policy):
    """A policy that knows which layer an expert is of.

    Args:
        num_experts: of all layers together.
        capacity: slots of the pool.
        num_layers: layers, each with as many experts.
    """

    def __init__(self, num_experts: int, capacity: int, *, num_layers: int) -> None:
        assert num_experts % num_layers == 0, (num_experts, num_layers)
        self.num_layers = num_layers
        self.layer_size = num_experts // num_layers
        super().__init__(num_experts, capacity)

    def layer_of(self, expert: int) -> int:
        """The layer of an expert of the pool."""
        return expert // self.layer_size


class PooledLRU(Pooled, LRU):
    """The use that is the most layer calls ago leaves first, of whichever layer.

    A pool with fewer slots than one token needs in all layers never hits with it: whoever comes
    next was used longest ago.
    """


class PooledEWMA(Pooled):
    """EWMA's score (`hotexperts.policy.ewma`), which decays with the calls of the expert's layer.

    So scores of all layers say how likely the next token needs the expert, and compare.
    """

    name = "ewma"

    def reset(self) -> None:
        """Forget every use."""
        super().reset()
        self.layers = [EWMA(self.layer_size, self.layer_size) for _ in range(self.num_layers)]

    def record(self, event: Event) -> None:
        """Advance the scores of the layers that are asked (one, unless it is a preload)."""
        asked: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for expert, count in zip(event.demand, event.counts, strict=True):
            asked[self.layer_of(expert)].append((expert % self.layer_size, count))
        for layer, uses in asked.items():
            demand, counts = zip(*uses, strict=True)
            self.layers[layer].record(Event(demand, counts, (), event.evict))
        self.tick += 1

    def eviction_key(self, expert: int) -> float:
        """Decayed count."""
        return self.layers[self.layer_of(expert)].eviction_key(expert % self.layer_size)


class LLRU(Pooled):
    """Layered LRU: recency corrected by how soon the expert's layer comes again.

    Our reading of arXiv 2509.02408, whose formula we have not seen. Layer calls are numbered
    `cycle * num_layers + layer`, a cycle being one pass over the layers. For an expert of layer j
    that was last used a calls ago, while layer l is called, its layer comes again in
    `d = (j - l - 1) % num_layers + 1` calls. Plain LRU evicts the largest a: of two experts that
    were both used in their layer's last call, the one whose layer comes next. Here the largest
    `a + 2 d` leaves first. As `a + d` is num_layers times the uses that the expert has let pass,
    and one, this is: who let more calls of its layer pass, then whose layer comes later.
    """

    name = "llru"

    def reset(self) -> None:
        """Forget every use."""
        super().reset()
        self.last_use = [-1] * self.num_experts
        self.layer, self.cycle = self.num_layers, -1  # the next call begins cycle 0

    def record(self, event: Event) -> None:
        """Stamp the demand; a layer that is not below the last one begins a cycle.

        A preload asks several layers at once: each expert is stamped as its own layer's call.
        """
        self.cycle += self.layer_of(min(event.demand)) <= self.layer
        self.layer = self.layer_of(max(event.demand))
        for expert in event.demand:
            self.last_use[expert] = self.cycle * self.num_layers + self.layer_of(expert)
        self.tick += 1

    def eviction_key(self, expert: int) -> int:
        """The negative of `a + 2 d`."""
        age = self.cycle * self.num_layers + self.layer - self.last_use[expert]
        distance = (self.layer_of(expert) - self.layer - 1) % self.num_layers + 1
        return -(age + 2 * distance)


class Floored(Pooled):
    """Mixed into a pool's policy: no layer falls below `floor` slots for the sake of another.

    A layer's own newcomers may still replace its experts. While the pool has free slots nobody is
    kept a place.
    """

    floor: ClassVar[int]

    def record(self, event: Event) -> None:
        """Protect the strongest `floor` residents of every other layer."""
        super().record(event)  # type: ignore[safe-super]  # the policy's, which comes after us
        self.protected: set[int] = set()
        members: dict[int, list[int]] = defaultdict(list)
        for expert in event.resident:
            members[self.layer_of(expert)].append(expert)
        for layer in members.keys() - {self.layer_of(event.demand[0])}:
            weakest_first = sorted(sorted(members[layer]), key=self.strength)
            self.protected.update(weakest_first[-self.floor :])

    def admit(
        self,
        misses: Sequence[int],
        candidates: Sequence[int],
        free: int,
        num_demanded: int,
        max_bypassed: int,
    ) -> Sequence[int]:
        """As many as find a place that is not protected."""
        usable = [expert for expert in candidates if expert not in self.protected]
        return super().admit(misses, usable, free, num_demanded, max_bypassed)

    def eviction_key(self, expert: int) -> Any:
        """The protected last, which `admit` leaves alone."""
        return expert in self.protected, self.strength(expert)

    def strength(self, expert: int) -> Any:
        """The pool's own key."""
        return super().eviction_key(expert)  # type: ignore[safe-super]


POOLED: dict[str, type[Pooled]] = {"ewma": PooledEWMA, "llru": LLRU, "lru": PooledLRU}
