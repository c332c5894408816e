"""Cache counters in vLLM's `/metrics` and log: workers publish, the API process collects."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.integrations.vllm.caches import ModelCaches
from hotexperts.observe.files import Counters, counter_file, total, write_counters

PUBLISH_SECONDS = 1.0
LOG_SECONDS = 60.0
log = logging.getLogger("vllm.hotexperts")


class Publisher:
    """Writes one worker's counters about once a second, without waiting for the device.

    Args:
        caches: of the worker's model.
        rank: the worker's.
    """

    def __init__(self, caches: ModelCaches, rank: int) -> None:
        self._caches: ModelCaches = weakref.proxy(caches)  # which owns this, and dies first
        self._rank = rank
        self._path: Path = counter_file(caches.config.instance_id, rank)
        self._due = self._log_due = 0.0
        self._logged: dict[str, int] = {}
        self._on_its_way: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def after_step(self) -> None:
        """Called after every step: publishes what has arrived, asks for more when it is time."""
        if self._on_its_way is not None and self._on_its_way[1].query():
            counts, self._on_its_way = self._on_its_way[0].tolist(), None
            providers = self._device_providers()
            pairs = zip(providers, counts, strict=True)
            self._publish({name: p.counters.stats_of(c).as_dict() for (name, p), c in pairs})
        now = time.monotonic()
        if now < self._due or self._on_its_way is not None:
            return
        self._due = now + PUBLISH_SECONDS
        providers = self._device_providers()
        if providers and providers[0][1].buffer.is_cuda:
            self._on_its_way = self._start_copy([p for _, p in providers])
        else:
            self._publish(self._caches.stats())

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    def _device_providers(self) -> list[tuple[str, DeviceWeightProvider]]:
        layers = self._caches.layers.items()
        found = [(name, layer.provider) for name, layer in layers]
        return [(name, p) for name, p in found if isinstance(p, DeviceWeightProvider)]

    @staticmethod
    def _start_copy(
        providers: list[DeviceWeightProvider],
    ) -> tuple[torch.Tensor, torch.cuda.Event]:
        counts = torch.stack([provider.counters.now for provider in providers])
        target = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        target.copy_(counts, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return target, event

    def _publish(self, counters: Counters) -> None:
        write_counters(self._path, counters)
        now, sums = time.monotonic(), total(counters)
        if now < self._log_due or sums == self._logged:
            return
        new = {name: value - self._logged.get(name, 0) for name, value in sums.items()}
        demands = new["hits"] + new["misses"]
        if demands > 0:
            log.info(
                "expert cache, rank %d: %.1f %% hits of %d, %.2f GB copied, %d waves in %d calls",
                self._rank,
                100 * new["hits"] / demands,
                demands,
                new["bytes_moved"] / 1e9,
                new["waves"],
                new["calls"],
            )
        self._log_due, self._logged = now + LOG_SECONDS, sums


def publishers_of(models: list[ModelCaches], rank: int) -> Iterator[Publisher]:
    """One publisher a model, made when first asked for."""
    for caches in models:
        if caches.publisher is None:
            caches.publisher = Publisher(caches, rank)
            weakref.finalize(caches, caches.publisher.close)  # at the process's end, too
        yield caches.publisher
