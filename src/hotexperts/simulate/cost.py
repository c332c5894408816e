"""What misses cost in time: a link that copies them, and layers that compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotexperts.errors import ConfigError
from hotexperts.simulate.trace import TraceError

LEAST_GB_S, MOST_GB_S = 0.001, 1e6
MOST_COMPUTE_MS = 1e6
MOST_EXPERT_NBYTES = 10**15


@dataclass(frozen=True, slots=True)
class Cost:
    """A step copies what it misses, then computes: the two do not overlap but for prefetch.

    Attributes:
        link_gb_s: 10^9 bytes a second into the slots.
        compute_ms: milliseconds that one layer computes in one step.
        moe_share: the part of it that is its experts', 0 to 1; it matters to prefetch alone.

    Raises:
        ConfigError: a value that no machine has.
    """

    link_gb_s: float = 55.0
    compute_ms: float = 0.0
    moe_share: float = 0.5

    def __post_init__(self) -> None:
        if not LEAST_GB_S <= self.link_gb_s <= MOST_GB_S:
            raise ConfigError(
                f"a link of {self.link_gb_s:g} GB/s: give {LEAST_GB_S:g} to {MOST_GB_S:g}, "
                "for example 55"
            )
        if not 0 <= self.compute_ms <= MOST_COMPUTE_MS:
            raise ConfigError(
                f"{self.compute_ms:g} ms of compute a layer: give 0 to {MOST_COMPUTE_MS:g}"
            )
        if not 0 <= self.moe_share <= 1:
            raise ConfigError(f"experts take {self.moe_share:g} of a layer's compute: give 0 to 1")

    def ms_per_token(self, miss_nbytes: int, num_layers: int, num_steps: int, batch: int) -> float:
        """The mean over `num_steps` steps, one or more, which missed `miss_nbytes` together."""
        copy_ms = self._copy_ms(miss_nbytes) / num_steps
        return (copy_ms + self.compute_ms * num_layers) / batch

    def bound_ms_per_token(
        self, miss_nbytes: int, num_layers: int, num_steps: int, batch: int
    ) -> float:
        """The same if copies and compute overlapped perfectly: the longer of the two."""
        copy_ms = self._copy_ms(miss_nbytes) / num_steps
        return max(copy_ms, self.compute_ms * num_layers) / batch

    def _copy_ms(self, nbytes: int) -> float:
        return nbytes / (self.link_gb_s * 1e6)


NO_COST = Cost()


def expert_nbytes(meta: Mapping[str, Any], expert_mb: float | None = None) -> int | None:
    """Bytes of one expert: `expert_mb` (10^6 bytes) where given, else `expert_nbytes` of the meta.

    Returns:
        None where neither says.

    Raises:
        ConfigError: an `expert_mb` below one byte or beyond any model.
        TraceError: an `expert_nbytes` that is no such number of bytes.
    """
    if expert_mb is not None:
        num_bytes = round(expert_mb * 1e6) if math.isfinite(expert_mb * 1e6) else 0
        if not 1 <= num_bytes <= MOST_EXPERT_NBYTES:
            raise ConfigError(
                f"an expert of {expert_mb:g} MB: give its 10^6 bytes, for example 9.4"
            )
        return num_bytes
    given = meta.get("expert_nbytes")
    if given is None:
        return None
    if type(given) is not int or not 1 <= given <= MOST_EXPERT_NBYTES:
        raise TraceError(f"meta, field 'expert_nbytes': {given!r:.60}: give the bytes of an expert")
    return given
