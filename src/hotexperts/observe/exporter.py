"""Counters as Prometheus wants them: a collector for any registry, and a server of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hotexperts.errors import ConfigError
from hotexperts.observe.files import Counters, total
from hotexperts.observe.names import COUNTERS, GAUGES, PREFIX

LOOPBACK = "127.0.0.1"


class Collector:
    """What `prometheus_client` asks at every scrape: sums over the layers, one a rank.

    Args:
        read: the counters now, by rank.
    """

    def __init__(self, read: Callable[[], Mapping[int, Counters]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Any]:
        """One family for each counter that somebody counts, and for each gauge."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = {str(rank): total(counters) for rank, counters in self._read().items()}
        for name, meaning in (COUNTERS | GAUGES).items():
            kind: Any = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            family = kind(PREFIX + name, meaning, labels=["rank"])
            for rank, sums in found.items():
                if name in sums:
                    family.add_metric([rank], sums[name])
            if family.samples:
                yield family


class MetricsServer:
    """Answers `GET /metrics` from a thread of its own until it is closed.

    Args:
        read: the counters now, by rank; called at each scrape.
        port: 0 takes a free one.
        host: who may ask; the default is this machine alone.

    Attributes:
        url: where to ask.

    Raises:
        ConfigError: the address cannot be had.
        ModuleNotFoundError: `prometheus_client` is not installed.
    """

    def __init__(
        self, read: Callable[[], Mapping[int, Counters]], port: int = 0, host: str = LOOPBACK
    ) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(Collector(read))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"metrics cannot be served at {host}:{port} ({error}): give another port"
            ) from error
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
