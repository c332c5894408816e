"""Plain counters of one layer's cache; they know nothing of how they are shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(slots=True)
class CacheStats:
    """Counts since the last reset. Each distinct expert counts once a layer call.

    Attributes:
        calls: layer calls.
        hits: demanded experts that were resident when the call began.
        misses: demanded experts that were not.
        bypasses: misses that were served without entering the cache.
        evictions: residents that gave up their slot.
        waves: kernel calls over part of a demand.
        bytes_moved: bytes copied from the store for misses.
        lru_hits: hits that an LRU cache of as many slots would have had; None where the policy
            does not count them.
        best_shadow_hits: likewise of the policy's best shadow cache, in each layer its own.
        ram_hits: of the rows that were to be copied, those that were in host memory; None, like
            the next two, where no experts are on disk.
        disk_reads: those that were read from disk.
        disk_bytes: bytes of these reads, whole blocks.
        prefetches: experts whose copy began before their layer asked; None, like the next four,
            where nothing is prefetched.
        prefetch_hits: of them, those that were then asked for and admitted, wholly there or not.
        prefetch_bytes: bytes copied ahead; they count as moved, too.
        prefetch_saved_bytes: of these, what the layer took; the others were copied for nothing.
        prefetching_layers: not a count: 1 while the layer's experts are guessed and its switch is
            on, else 0; added up, the number of such layers.
    """

    calls: int = 0
    hits: int = 0
    misses: int = 0
    bypasses: int = 0
    evictions: int = 0
    waves: int = 0
    bytes_moved: int = 0
    lru_hits: int | None = None
    best_shadow_hits: int | None = None
    ram_hits: int | None = None
    disk_reads: int | None = None
    disk_bytes: int | None = None
    prefetches: int | None = None
    prefetch_hits: int | None = None
    prefetch_bytes: int | None = None
    prefetch_saved_bytes: int | None = None
    prefetching_layers: int | None = None

    @property
    def demands(self) -> int:
        """Hits and misses together."""
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float:
        """Hits over demands, 0.0 to 1.0; NaN before the first demand."""
        return self.hits / self.demands if self.demands else float("nan")

    def reset(self) -> None:
        """Set every counter to zero."""
        for field in fields(self):
            setattr(self, field.name, field.default)

    def as_dict(self) -> dict[str, int]:
        """The counters by name; those that are not counted are left out."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def since(self, earlier: CacheStats) -> CacheStats:
        """What was counted after an earlier snapshot, and the state as it is now."""
        then = earlier.as_dict()
        new = CacheStats(**{n: value - then.get(n, 0) for n, value in self.as_dict().items()})
        new.prefetching_layers = self.prefetching_layers
        return new


@dataclass(slots=True)
class TierCounts:
    """What one layer's rows in host memory saved, and what was read; see `CacheStats`."""

    ram_hits: int = 0
    disk_reads: int = 0
    disk_bytes: int = 0


def total(stats: Iterable[CacheStats]) -> CacheStats:
    """The sum over layers, as a new object."""
    result = CacheStats()
    for one in stats:
        for name, value in one.as_dict().items():
            setattr(result, name, (getattr(result, name) or 0) + value)
    return result
