"""Half of an expert resident: a rule for replays alone, as the engine's slot holds a whole one."""

from __future__ import annotations

from dataclasses import dataclass

from hotexperts.errors import ConfigError
from hotexperts.policy.ewma import EWMA
from hotexperts.simulate.rules import ENGINE, Rules
from hotexperts.simulate.schedule import LayerCall, Prefill
from hotexperts.simulate.streams import streams
from hotexperts.simulate.trace import Trace
from hotexperts.stats import CacheStats
from hotexperts.types import Event

FRACTIONAL = "fractional"
HALF, WHOLE = 1, 2  # in halves of an expert


@dataclass(slots=True)
class FractionalStats(CacheStats):
    """What was counted over decode; a hit is an expert that was resident whole.

    Attributes:
        part_hits: misses of which half was resident.
    """

    part_hits: int = 0

    @property
    def resident(self) -> float:
        """Demanded experts in halves that were resident, counted in experts."""
        return self.hits + self.part_hits * HALF / WHOLE

    @property
    def hit_rate(self) -> float:
        """Demanded bytes that were resident, 0.0 to 1.0; NaN before the first demand."""
        return self.resident / self.demands if self.demands else float("nan")

    def missed_nbytes(self, nbytes: int) -> int:
        """Bytes copied for the misses, of experts of `nbytes` whose first half is rounded down."""
        return self.misses * nbytes - self.part_hits * (nbytes // WHOLE)


@dataclass(frozen=True, slots=True)
class FractionalOutcome:
    """What a replay counted.

    Attributes:
        layers: of each layer.
    """

    layers: tuple[FractionalStats, ...]

    @property
    def total(self) -> FractionalStats:
        """The sum over the layers."""
        counted = [one.as_dict() for one in self.layers]
        names = ("calls", "hits", "misses", "part_hits")
        return FractionalStats(**{name: sum(one[name] for one in counted) for name in names})


def replay_fractional(
    trace: Trace,
    capacity: int,
    batch: int = 1,
    prefill: Prefill = "warm",
    rules: Rules = ENGINE,
) -> FractionalOutcome:
    """Play a trace through caches that keep hot experts whole and lukewarm ones by half.

    The idea is MoEpic's (arXiv 2509.08342): who has the first half of an expert can begin with it
    while the second travels. The rule is our reading, and claims nothing about the paper. The
    bytes of `capacity` experts are a layer's room, counted in halves. After each call its demand
    is there whole; with the residents it is ranked by EWMA's score (`hotexperts.policy.ewma`).
    The first `capacity // 2` keep all of what is there of them, the next ones half, while there is
    room; what room is left then takes second halves, in the same order. What was resident of a
    demanded expert stays in its call, and a half comes back only when its expert is demanded.

    Arguments and errors are those of `replay`.

    Raises:
        ConfigError: see `check_fractional`.
    """
    check_fractional(rules)
    layers = tuple(FractionalStats() for _ in range(trace.num_layers))
    for stream in streams(trace, capacity, batch, prefill, rules):
        for calls in stream.runs:
            cache = _Halves(stream.num_experts, stream.num_slots)
            for call in calls:
                found = cache.play(call)
                if call.counted:
                    stats = layers[call.layer]
                    stats.calls += 1
                    stats.hits += found.count(WHOLE)
                    stats.misses += len(found) - found.count(WHOLE)
                    stats.part_hits += found.count(HALF)
    return FractionalOutcome(layers)


def check_fractional(rules: Rules) -> None:
    """Refuse rules that halves cannot follow.

    Raises:
        ConfigError: a global pool, or ties as listed.
    """
    if rules.pool == "global":
        raise ConfigError(f"policy {FRACTIONAL!r} ranks one layer: give pool 'layer' or 'split'")
    if rules.ties != "id":
        raise ConfigError(f"policy {FRACTIONAL!r} breaks ties by id alone: give ties 'id'")


class _Halves:
    """One layer's room, and what is in it."""

    def __init__(self, num_experts: int, num_slots: int) -> None:
        self.room = WHOLE * num_slots
        self.num_whole = num_slots // 2
        self.use = EWMA(num_experts, num_slots)
        self.held: dict[int, int] = {}  # halves of each expert, none of them 0

    def play(self, call: LayerCall) -> list[int]:
        """What was resident of each demanded expert; then who stays is chosen anew."""
        found = [self.held.get(expert, 0) for expert in call.demand]
        self.use.record(Event(call.demand, call.counts, self.held, call.evict))
        self._keep(call)
        return found

    def _keep(self, call: LayerCall) -> None:
        there = self.held | dict.fromkeys(call.demand, WHOLE)
        staying = there.keys() & set(call.demand) if call.evict else there.keys()
        kept = {expert: self.held[expert] for expert in staying & self.held.keys()}
        room = self.room - sum(kept.values())
        ranked = sorted(there, key=lambda expert: (self.use.eviction_key(expert), expert))[::-1]
        halves = [WHOLE] * self.num_whole + [HALF] * len(ranked)
        seconds = [WHOLE] * len(ranked)
        for shares in (halves, seconds):
            for expert, share in zip(ranked, shares, strict=False):
                more = min(share, there[expert]) - kept.get(expert, 0)
                more = min(max(more, 0), room)
                if more:
                    kept[expert] = kept.get(expert, 0) + more
                    room -= more
        self.held = kept
