"""The API process's side: counters that workers left, as Prometheus wants them."""

from __future__ import annotations

import functools
from typing import Any

from hotexperts.observe.exporter import Collector
from hotexperts.observe.files import Counters, read_counters

_instances: set[str] = set()


def watch(instance: str) -> None:
    """Show this engine's counters in the process's metrics."""
    _instances.add(instance)


def _read() -> dict[int, Counters]:
    return {
        rank: counters
        for instance in sorted(_instances)
        for rank, counters in read_counters(instance).items()
    }


def patch(module: Any) -> None:
    """Register with whatever registry `vllm.v1.metrics.prometheus` gives out."""
    original = module.get_prometheus_registry
    known: list[Any] = []  # the global registry comes again and again, others are new each time

    @functools.wraps(original)
    def get_prometheus_registry() -> Any:
        registry = original()
        if _instances and registry not in known:
            registry.register(Collector(_read))
            if registry is module.REGISTRY:
                known.append(registry)
        return registry

    module.get_prometheus_registry = get_prometheus_registry
