"""Which expert leaves, and which is let in? One file a policy, one contract (`base.Policy`)."""

from hotexperts.config import DEFAULT_POLICY
from hotexperts.policy.base import Policy
from hotexperts.registry import Registry

POLICIES: Registry[Policy] = Registry(
    "policy",
    Policy,  # type: ignore[type-abstract]  # the base is only compared with
    {
        "adv": "hotexperts.policy.adv:ADV",
        "auto": "hotexperts.policy.auto:AUTO",
        "ewma": "hotexperts.policy.ewma:EWMA",
        "fifo": "hotexperts.policy.fifo:FIFO",
        "lcp": "hotexperts.policy.lcp:LCP",
        "lfru": "hotexperts.policy.lfru:LFRU",
        "lfu": "hotexperts.policy.lfu:LFU",
        "lru": "hotexperts.policy.lru:LRU",
        "slru": "hotexperts.policy.slru:SLRU",
    },
)

__all__ = ["DEFAULT_POLICY", "POLICIES", "Policy"]
