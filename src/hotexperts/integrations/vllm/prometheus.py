"""The API process's side: counters that workers left, as Prometheus wants them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from hotexperts.observe.files import read_counters, total
from hotexperts.observe.names import COUNTERS, PREFIX

_instances: set[str] = set()


def watch(instance: str) -> None:
    """Show this engine's counters in the process's metrics."""
    _instances.add(instance)


class Collector:
    """What `prometheus_client` asks at every scrape: sums over the layers, one a rank."""

    def collect(self) -> Iterator[Any]:
        """One family a counter."""
        from prometheus_client.core import CounterMetricFamily

        found = {
            str(rank): total(counters)
            for instance in sorted(_instances)
            for rank, counters in read_counters(instance).items()
        }
        for name, meaning in COUNTERS.items():
            family = CounterMetricFamily(PREFIX + name, meaning, labels=["rank"])
            for rank, sums in found.items():
                family.add_metric([rank], sums.get(name, 0))
            yield family


def patch(module: Any) -> None:
    """Register with whatever registry `vllm.v1.metrics.prometheus` gives out."""
    original = module.get_prometheus_registry
    known: list[Any] = []  # the global registry comes again and again, others are new each time

    @functools.wraps(original)
    def get_prometheus_registry() -> Any:
        registry = original()
        if _instances and registry not in known:
            registry.register(Collector())
            if registry is module.REGISTRY:
                known.append(registry)
        return registry

    module.get_prometheus_registry = get_prometheus_registry
