"""The policies' constants for the device, taken from the policies: one place says each number."""

from __future__ import annotations

import numpy as np
import torch

from hotexperts.policy.ewma import DECAY
from hotexperts.policy.ewma import SMALLEST as _SMALLEST
from hotexperts.policy.lcp import TABLE, UNUSED
from hotexperts.policy.lfu import AGEING_PERIOD_PER_SLOT, ONE_USE

EWMA_DECAY = float(DECAY)
SMALLEST = float(_SMALLEST)
LCP_UNUSED = float(UNUSED)
AUTO_FAST = (float(np.float32(0.8)), float(np.float32(1 - 0.8)))
AUTO_SLOW = (float(np.float32(0.97)), float(np.float32(1 - 0.97)))
AUTO_MIX = (float(np.float32(0.4)), float(np.float32(1 - 0.4)))

__all__ = [
    "AGEING_PERIOD_PER_SLOT",
    "AUTO_FAST",
    "AUTO_MIX",
    "AUTO_SLOW",
    "EWMA_DECAY",
    "LCP_UNUSED",
    "ONE_USE",
    "SMALLEST",
    "lcp_table",
]


def lcp_table() -> torch.Tensor:
    """Powers of LCP's nu by age, float32."""
    return torch.from_numpy(TABLE)
