"""Which expert leaves, and which is let in? One file a policy, one contract (`base.Policy`)."""

from hotexperts.config import DEFAULT_POLICY
from hotexperts.policy.base import Policy
from hotexperts.registry import Registry

_BOUND = "is a bound, which knows the future: it is for `hotexperts simulate`"
_SIMULATED = {
    "belady": _BOUND,
    "belady-atomic": _BOUND,
    "belady-forced": _BOUND,
    "fractional": "keeps half an expert, and a slot holds a whole one: it is for "
    "`hotexperts simulate`",
    "infinite": _BOUND,
    "llru": "ranks experts of all layers, and each layer has its own slots: it is for "
    "`hotexperts simulate --pool global`",
}

POLICIES: Registry[Policy] = Registry(
    "policy",
    Policy,  # type: ignore[type-abstract]  # the base is only compared with
    {
        "adv": "hotexperts.policy.adv:ADV",
        "arc": "hotexperts.policy.arc:ARC",
        "auto": "hotexperts.policy.auto:AUTO",
        "ewma": "hotexperts.policy.ewma:EWMA",
        "fifo": "hotexperts.policy.fifo:FIFO",
        "heat-lru": "hotexperts.policy.heat_lru:HeatLRU",
        "lcp": "hotexperts.policy.lcp:LCP",
        "learned": "hotexperts.policy.learned:Learned",
        "least-stale": "hotexperts.policy.least_stale:LeastStale",
        "lfru": "hotexperts.policy.lfru:LFRU",
        "lfu": "hotexperts.policy.lfu:LFU",
        "lirs": "hotexperts.policy.lirs:LIRS",
        "lru": "hotexperts.policy.lru:LRU",
        "lru-2": "hotexperts.policy.lru_2:LRU2",
        "random": "hotexperts.policy.random_victim:Random",
        "reuse-distance": "hotexperts.policy.reuse_distance:ReuseDistance",
        "s3-fifo": "hotexperts.policy.s3_fifo:S3FIFO",
        "sieve": "hotexperts.policy.sieve:SIEVE",
        "slru": "hotexperts.policy.slru:SLRU",
        "static": "hotexperts.policy.static:Static",
        "w-tinylfu": "hotexperts.policy.w_tinylfu:WTinyLFU",
    },
    _SIMULATED,
)

__all__ = ["DEFAULT_POLICY", "POLICIES", "Policy"]
