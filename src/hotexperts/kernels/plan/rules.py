"""The policies' constants for the device, taken from the policies: one place says each number."""

from __future__ import annotations

import numpy as np
import torch

from hotexperts.policy import adv, lcp, lfu
from hotexperts.policy.ewma import DECAY
from hotexperts.policy.ewma import SMALLEST as _SMALLEST

ONE_USE, AGEING_PERIOD_PER_SLOT = lfu.ONE_USE, lfu.AGEING_PERIOD_PER_SLOT
EWMA_DECAY = float(DECAY)
SMALLEST = float(_SMALLEST)
LCP_UNUSED = float(lcp.UNUSED)


def _mix(share: float) -> tuple[float, float]:
    """A share and its rest, as the policies round them."""
    return float(np.float32(share)), float(np.float32(1 - share))


AUTO_FAST, AUTO_SLOW, AUTO_MIX = _mix(0.8), _mix(0.97), _mix(0.4)
NUM_SHADOWS = len(adv.SHADOWS)
NUM_PLAYED = NUM_SHADOWS + 1  # and LRU's
ADV_DISCOUNT, ADV_MARGIN, ADV_HOME = float(adv.DISCOUNT), float(adv.MARGIN), adv.HOME
ADV_LONG_DISCOUNT, ADV_MOST_REGRET = float(adv.LONG_DISCOUNT), float(adv.MOST_REGRET)
# Averages in one list: the fast ones, then the slow ones.
ADV_AVERAGES = tuple(_mix(d) for d in (*adv.FAST_DECAYS, *adv.SLOW_DECAYS))
ADV_FAST_ROW = tuple(adv.FAST_ROW)
ADV_SLOW_ROW = tuple(len(adv.FAST_DECAYS) + row for row in adv.SLOW_ROW)
ADV_MIX = tuple(_mix(a) for a, _, _ in adv.SHADOWS)


def lcp_table() -> torch.Tensor:
    """Powers of LCP's nu by age, float32."""
    return torch.from_numpy(lcp.TABLE)


KERNEL_RULES: dict[str, tuple[float, ...]] = {  # what the kernel takes, by position
    "lru": (0,),
    "lfu": (ONE_USE, AGEING_PERIOD_PER_SLOT),
    "lfru": (0,),
    "lcp": (LCP_UNUSED, len(lcp.TABLE) - 1),
    "ewma": (EWMA_DECAY, SMALLEST),
    "auto": (*AUTO_FAST, *AUTO_SLOW, *AUTO_MIX, SMALLEST),
    "adv": (
        ADV_DISCOUNT,
        ADV_MARGIN,
        SMALLEST,
        ADV_HOME,
        *ADV_FAST_ROW,  # from 4
        *ADV_SLOW_ROW,  # from 11
        *(a for a, _ in ADV_MIX),  # from 18
        *(b for _, b in ADV_MIX),  # from 25
        *(decay for decay, _ in ADV_AVERAGES),  # from 32
        *(weight for _, weight in ADV_AVERAGES),  # from 39
        *(ADV_AVERAGES[row][0] for row in ADV_FAST_ROW),  # from 46
        *(ADV_AVERAGES[row][1] for row in ADV_FAST_ROW),  # from 53
        *(ADV_AVERAGES[row][0] for row in ADV_SLOW_ROW),  # from 60
        *(ADV_AVERAGES[row][1] for row in ADV_SLOW_ROW),  # from 67
        ADV_LONG_DISCOUNT,  # 74
        ADV_MOST_REGRET,
    ),
}
