"""Where a worker's cache starts warm from, and is saved to at the end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hotexperts.cache import warm_start
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.errors import CheckpointError, ConfigError
from hotexperts.integrations.vllm.caches import ModelCaches

log = logging.getLogger("vllm.hotexperts")


def start_warm(caches: ModelCaches, rank: int) -> None:
    """Where a state is wanted and was saved; from now on it may be saved anew.

    A file that does not fit any more starts an empty cache with a warning: a server must not stay
    down for it.
    """
    caches.has_started = True
    path = state_path(caches.options.state, caches.config.parallel_config, rank)
    if path is None:
        return
    if not path.exists():
        log.info("expert cache: no %s yet, starting empty", path)
        return
    try:
        warm_start.load(path, caches.providers, _about(caches))
    except (CheckpointError, ConfigError) as error:
        log.warning("expert cache: starting empty, and %s is replaced at the end: %s", path, error)
    else:
        log.info("expert cache: warm from %s", path)


def save_state(caches: ModelCaches, rank: int) -> str | None:
    """Save what a restart may keep, where that is wanted; the file's name.

    A start that failed saves nothing: its slots hold what profiling asked for.
    """
    path = state_path(caches.options.state, caches.config.parallel_config, rank)
    if path is None or not caches.has_started:
        return None
    warm_start.save(path, caches.providers, _about(caches))
    return str(path)


def state_path(name: str | None, parallel: Any, rank: int) -> Path | None:
    """The file of one rank of one replica: its experts, or its part of them, are its own."""
    if name is None:
        return None
    if parallel.data_parallel_size > 1:
        name += f".dp{parallel.data_parallel_rank}"
    return Path(name if parallel.world_size == 1 else f"{name}.rank{rank}")


def _about(caches: ModelCaches) -> dict[str, Any]:
    provider = next(iter(caches.providers.values()))
    mode = "device" if isinstance(provider, DeviceWeightProvider) else "host"
    return {"policy": caches.options.cache.policy, "mode": mode, "capacity": caches.capacity}
