"""How a replay prefetches, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hotexperts.errors import ConfigError
from hotexperts.predict import Control
from hotexperts.simulate.cost import Cost
from hotexperts.simulate.foretell import Tap
from hotexperts.simulate.rules import Rules
from hotexperts.stats import CacheStats

Slack = Literal["compute", "unlimited"]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """How a replay prefetches.

    Attributes:
        ahead: calls from where a guess is made to the call that it is for.
        tap: at the "output" of the layer, or at the "input" of its experts: earlier, knowing less.
        rows: staging rows for one call's guesses; None: twice the experts that a token asks for.
        ratio: bytes with prefetch over bytes without, see `Control`; None: no such budget.
        call_nbytes: bytes of one call's guesses at most; None: as many as there are rows.
        slack: "compute" hides transfers behind the stated compute alone, "unlimited" hides all.

    Raises:
        ConfigError: a value that is none of these.
    """

    ahead: int = 1
    tap: Tap = "output"
    rows: int | None = None
    ratio: float | None = 1.5
    call_nbytes: int | None = None
    slack: Slack = "compute"

    def __post_init__(self) -> None:
        for name, kind in (("tap", Tap), ("slack", Slack)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"prefetch {name} {getattr(self, name)!r}: give one of "
                    f"{', '.join(get_args(kind))}"
                )
        Control(1, 1 if self.rows is None else self.rows, self.ratio)

    def check(self, rules: Rules, cost: Cost, nbytes: int | None) -> None:
        """Refuse what a replay could not do.

        Raises:
            ConfigError: layers that share slots, time without compute or bytes, or a budget of
                bytes that holds no expert.
        """
        if rules.pool != "layer":
            raise ConfigError(f"prefetch with pool {rules.pool!r}: give pool 'layer'")
        if self.slack == "compute" and not cost.compute_ms:
            raise ConfigError(
                "prefetch hides behind compute, and a layer computes for 0 ms: give --compute-ms, "
                "or --prefetch-slack unlimited"
            )
        if nbytes is None and (self.slack == "compute" or self.call_nbytes is not None):
            raise ConfigError("prefetch takes time and bytes: give --expert-mb, an expert's size")
        if nbytes is not None and self.call_nbytes is not None and self.call_nbytes < nbytes:
            raise ConfigError(
                f"a prefetch budget of {self.call_nbytes} bytes a call, and an expert has "
                f"{nbytes}: give more"
            )

    def max_guesses(self, top_k: int, nbytes: int | None) -> int:
        """Experts transferred for one call at most."""
        rows = 2 * top_k if self.rows is None else self.rows
        if self.call_nbytes is None or nbytes is None:
            return rows
        return min(rows, self.call_nbytes // nbytes)


NO_PREFETCH = Prefetch()


@dataclass(slots=True)
class PrefetchStats(CacheStats):
    """What a replay with prefetch counted, over decode; hits and misses are the cache's alone.

    Attributes:
        issued: experts transferred on a guess.
        covered: misses that were among them.
        late: of these, not there yet when their layer knew its demand.
        num_off: layers that were switched off at the end.
        ms: of all decode steps together; None where slack is unlimited, and of one layer.
    """

    issued: int = 0
    covered: int = 0
    late: int = 0
    num_off: int = 0
    ms: float | None = None

    @property
    def wasted(self) -> int:
        """Experts transferred and not used."""
        return self.issued - self.covered

    @property
    def relative_bytes(self) -> float:
        """Bytes transferred, over those without prefetch; NaN where these are none."""
        return (self.misses + self.wasted) / self.misses if self.misses else float("nan")

    @property
    def stall_free_rate(self) -> float:
        """Demands that were resident or prefetched in time, 0.0 to 1.0; NaN before the first."""
        free = self.hits + self.covered - self.late
        return free / self.demands if self.demands else float("nan")


@dataclass(frozen=True, slots=True)
class PrefetchOutcome:
    """What a replay with prefetch counted.

    Attributes:
        layers: of each layer.
        ms: of all decode steps together; None where slack is unlimited.
    """

    layers: tuple[PrefetchStats, ...]
    ms: float | None

    @property
    def total(self) -> PrefetchStats:
        """The sum over the layers."""
        counted = [one.as_dict() for one in self.layers]
        found = PrefetchStats(ms=self.ms)
        for name in counted[0]:
            setattr(found, name, sum(counts[name] for counts in counted))
        return found
