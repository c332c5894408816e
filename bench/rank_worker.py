"""What `bench/vllm_ranks.py` calls in each worker (`worker_extension_cls`), by `collective_rpc`.

Importing it makes vLLM draw its random weights here, and time how long a model takes to load.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotexperts.bench.vllm.model import Model, synchronize
from hotexperts.bench.vllm.weights import draw_weights
from stamps import Stamps, all_reduce_by
from vllm_engine import Replay

_load_seconds: list[float] = []


def _time_loading() -> None:
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load = DummyModelLoader.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = load(self, *args, **kwargs)
        synchronize()
        _load_seconds.append(time.perf_counter() - start)
        return found

    DummyModelLoader.load_model = load_model


draw_weights()
_time_loading()


class Bench:
    """Methods that vLLM's worker gets; their names are none of its own."""

    model_runner: Any
    vllm_config: Any

    def bench_prepare(self, ids: Any) -> dict[str, Any]:
        """Before anything else; says what loading took.

        Args:
            ids: int `[steps, layers, rows, K]`, what the routers answer: see `Replay`.
        """
        several = self.vllm_config.parallel_config.world_size > 1
        self.bench_model = Model(self.vllm_config, self.model_runner, keeps_graphs=several)
        self.bench_replay = Replay(self.bench_model, torch.from_numpy(ids))
        self.bench_stamps: Stamps | None = None
        self.bench_steps: list[Any] | None = None
        execute = self.model_runner.execute_model

        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = execute(*args, **kwargs)
            if self.bench_steps is not None and self.bench_stamps is not None:
                self.bench_steps.append((self.bench_stamps.of_step(), _copied(self.bench_model)))
            return result

        self.model_runner.execute_model = recorded
        found = {"load_seconds": _load_seconds[-1], **self.bench_model.caches.memory()}
        if several:
            found["all_reduce"] = all_reduce_by()
        return found | {"process_bytes": _resident_nbytes()}

    def bench_use(self, num_slots: int, is_stamped: bool) -> None:
        """So many slots a layer, and graphs with or without stamps."""
        if is_stamped and self.bench_stamps is None:
            self.bench_stamps = Stamps(self.model_runner)
        if self.bench_stamps is not None:
            self.bench_stamps.is_on = is_stamped
        self.bench_model.use_slots(num_slots)

    def bench_warm(self, seed: int) -> None:
        """The replay from its first step, and what a prefill sees."""
        self.bench_replay.step = 0
        self.bench_replay.show_random(seed)

    def bench_begin(self, is_recorded: bool) -> None:
        """Count from here on, and keep each step's stamps if asked."""
        synchronize()
        self.bench_model.reset_stats()
        self.bench_steps = [] if is_recorded else None

    def bench_end(self) -> dict[str, Any]:
        """Counters of all layers since `bench_begin`, and its steps' stamps and copied bytes."""
        synchronize()
        steps, self.bench_steps = self.bench_steps, None
        found: dict[str, Any] = {"counts": self.bench_model.sums()}
        if steps and self.bench_stamps is not None:
            found["clock_step_ns"] = self.bench_stamps.clock_step_ns()
            found["times"] = np.stack([times.cpu().numpy() for times, _ in steps])
            copied = np.stack([_bytes(self.bench_model, counts) for _, counts in steps])
            found["moved"] = np.diff(copied, axis=0, prepend=0)
        return found


def _copied(model: Model) -> Any:
    """The layers' counters now, in stream order where a device keeps them."""
    providers = list(model.caches.providers.values())
    if hasattr(providers[0], "kernel"):
        return torch.stack([provider.counters.now for provider in providers])
    return [provider.stats.bytes_moved for provider in providers]


def _bytes(model: Model, counts: Any) -> Any:
    """Bytes that each layer had copied, from what `_copied` gave."""
    if not isinstance(counts, torch.Tensor):
        return np.array(counts)
    providers = model.caches.providers.values()
    pairs = zip(providers, counts.cpu().tolist(), strict=True)
    return np.array([provider.counters.stats_of(found).bytes_moved for provider, found in pairs])


def _resident_nbytes() -> int:
    """Of this process, page-locked experts included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return 1024 * int(found["VmRSS"].split()[0])
