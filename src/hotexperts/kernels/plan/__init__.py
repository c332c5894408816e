"""Plan: from routed ids to hits, misses, victims, slots and remapped ids, on the device."""

from hotexperts.kernels.plan.layout import DEVICE_POLICIES, Counter, PlanLayout, may_bypass

__all__ = ["DEVICE_POLICIES", "Counter", "PlanLayout", "may_bypass"]
