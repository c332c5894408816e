"""How a replay's caches are cut and begun; the defaults are what the engine does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hotexperts.errors import ConfigError
from hotexperts.simulate.trace import Trace

Ties = Literal["id", "listed"]
Pool = Literal["layer", "global", "split"]
Sequences = Literal["warm", "cold"]
PROMPTS = "trace"  # `Rules.preload`: the replayed trace's own prefill


@dataclass(frozen=True, slots=True)
class Rules:
    """What may differ from the engine's own caches.

    Attributes:
        ties: who leaves first of two experts with equal scores: "id" the lower id; "listed" the
            one used earlier and, of one call, the one that the router lists later. Of misses
            that do not all fit, the lower id or the one listed earlier enters.
        pool: "layer" gives every layer `capacity` slots of its own; "global" puts all layers'
            slots into one pool; "split" gives each layer its own number, `capacity` on average
            (see `hotexperts.simulate.split`).
        pool_floor: slots that no layer of a global pool loses to others once it has them.
        sequences: "cold" empties caches and histories when a sequence ends, in whichever lane;
            "warm" keeps them.
        preload: fill the slots with the experts used most before the first call (and after every
            cold start): of `PROMPTS`, or of all tokens of another trace. None starts empty.

    Raises:
        ConfigError: a value that is none of these, or a floor outside a global pool.
    """

    ties: Ties = "id"
    pool: Pool = "layer"
    pool_floor: int = 0
    sequences: Sequences = "warm"
    preload: Trace | Literal["trace"] | None = None

    def __post_init__(self) -> None:
        for name, kind in (("ties", Ties), ("pool", Pool), ("sequences", Sequences)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"{name} {getattr(self, name)!r}: give one of {', '.join(get_args(kind))}"
                )
        if not (self.preload in (None, PROMPTS) or isinstance(self.preload, Trace)):
            raise ConfigError(f"preload {self.preload!r}: give a Trace, or {PROMPTS!r}")
        if self.pool_floor < 0:
            raise ConfigError(f"pool floor {self.pool_floor}: give 0 slots or more")
        if self.pool_floor and self.pool != "global":
            raise ConfigError(
                f"pool floor {self.pool_floor} with pool {self.pool!r}: only layers that share a "
                "pool have a floor: give pool 'global', or no floor"
            )


ENGINE = Rules()
