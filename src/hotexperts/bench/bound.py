"""What could be reached: the serial floor and the bound of a step, in plain numbers.

Serial floor = resident + missed bytes / (0.94 x link): what copying on demand can reach. Percent of
bound = max(resident, missed bytes / link) / measured: what perfect overlap could reach. It falls
when a better policy leaves fewer bytes, so it compares runs of the same hits only.
"""

from __future__ import annotations

from typing import NamedTuple

PART_OF_LINK = 0.94  # that copies on demand can have


class Bound(NamedTuple):
    """Of one kind of call.

    Attributes:
        serial_floor_ms: see above.
        percent_of_bound: see above; 0 to 100 unless the resident model was slower.
    """

    serial_floor_ms: float
    percent_of_bound: float


def bound(ms: float, resident_ms: float, missed_nbytes: float, link_gb_s: float) -> Bound:
    """The bound of a call.

    Args:
        ms: that it took.
        resident_ms: that it takes with every expert on the device.
        missed_nbytes: bytes of the experts it missed.
        link_gb_s: 10^9 bytes a second.
    """
    nbytes_per_ms = link_gb_s * 1e6
    floor = resident_ms + missed_nbytes / (PART_OF_LINK * nbytes_per_ms)
    return Bound(floor, 100 * max(resident_ms, missed_nbytes / nbytes_per_ms) / ms)
