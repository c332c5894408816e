"""What one layer counted: its kernels on the device, and the host what no kernel knows of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotexperts.cache.device_slots import DeviceSlots
from hotexperts.cache.lookahead import Lookahead
from hotexperts.kernels.plan import Counter
from hotexperts.stats import CacheStats


class DeviceCounters:
    """Counters of a layer, to be read at any time.

    Args:
        slots: the layer's, with its kernel.
        lookahead: the layer's; None without prefetches.
    """

    def __init__(self, slots: DeviceSlots, lookahead: Lookahead | None) -> None:
        self._on_device = slots.kernel.counters
        self._row_nbytes = slots.store.form.nbytes
        self._has_shadows = slots.plan.policy == "adv"
        self._lookahead = lookahead
        self._waves_by_host = self._copies_by_host = 0

    @property
    def now(self) -> torch.Tensor:
        """Int64, on the device: the kernel's counters; with a lookahead, whether it is on."""
        if self._lookahead is None:
            return self._on_device
        return torch.cat([self._on_device, self._lookahead.is_on])

    def count_by_host(self, *, num_waves: int = 0, num_copies: int = 0) -> None:
        """Waves and rows that no kernel counts."""
        self._waves_by_host += num_waves
        self._copies_by_host += num_copies

    def clear(self) -> None:
        """Set all to zero, in stream order."""
        self._on_device.zero_()
        self._waves_by_host = self._copies_by_host = 0

    def stats_of(self, counts: Sequence[int]) -> CacheStats:
        """The counters as they were when `now` held these values."""
        shadows = counts[Counter.SHADOW_HITS : Counter.LRU_HITS]
        ahead = {} if self._lookahead is None else self._lookahead.stats_of(counts[Counter.AHEAD :])
        return CacheStats(
            calls=counts[Counter.CALLS],
            hits=counts[Counter.HITS],
            misses=counts[Counter.MISSES],
            bypasses=counts[Counter.BYPASSES],
            evictions=counts[Counter.EVICTIONS],
            waves=counts[Counter.WAVES] + self._waves_by_host,
            bytes_moved=self._bytes_of(counts),
            lru_hits=counts[Counter.LRU_HITS] if self._has_shadows else None,
            best_shadow_hits=max(shadows) if self._has_shadows else None,
            **ahead,
        )

    def _bytes_of(self, counts: Sequence[int]) -> int:
        """Over the link: rows copied, less what was there already, and what came ahead."""
        num_copies = counts[Counter.COPIES] + self._copies_by_host
        if self._lookahead is None:
            return num_copies * self._row_nbytes
        more = self._lookahead.rows_more(counts[Counter.AHEAD :])
        return int((num_copies + more) * self._row_nbytes)
