"""Where a worker's cache starts warm from, and is saved to, now and then and at the end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn

from hotexperts.cache import warm_start
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.errors import CheckpointError, ConfigError
from hotexperts.integrations.identity import model_digest
from hotexperts.integrations.vllm.caches import ModelCaches
from hotexperts.integrations.vllm.ending import is_due
from hotexperts.integrations.vllm.ranks import same_on_all_ranks

log = logging.getLogger("vllm.hotexperts")


def start_warm(caches: ModelCaches, rank: int, model: nn.Module) -> None:
    """Where a state is wanted and was saved; from now on it may be saved anew.

    A file that does not fit any more starts an empty cache with a warning: a server must not stay
    down for it. So do files of ranks that were saved after different steps.

    Args:
        caches: of the model, as they will serve.
        rank: of this process among all workers.
        model: loaded; some of its weights tell it from others of its shape.

    Raises:
        ConfigError: a pipe, a device or a folder has the file's name.
    """
    caches.has_started, caches.rank = True, rank
    parallel = caches.config.parallel_config
    path = state_path(caches.options.state, parallel, rank)
    if path is None:
        return
    warm_start.check_file(path)
    caches.digest = model_digest(model, caches.providers)
    is_warm = _load(path, caches)
    if not parallel.enable_expert_parallel and not same_on_all_ranks(caches.providers.values()):
        for provider in caches.providers.values():
            provider.reset()
        log.warning("expert cache: starting empty, for %s is not of the other ranks' step", path)
    elif is_warm:
        log.info("expert cache: warm from %s", path)


def _load(path: Path, caches: ModelCaches) -> bool:
    if not path.exists():
        log.info("expert cache: no %s yet, starting empty", path)
        return False
    try:
        warm_start.load(path, caches.providers, _about(caches))
    except (CheckpointError, ConfigError) as error:
        log.warning("expert cache: starting empty, and %s is replaced later: %s", path, error)
        return False
    return True


def save_now_and_then(caches: ModelCaches) -> None:
    """After each step: save what would be lost with a process that is killed, if it is time."""
    if not caches.has_started:
        return
    caches.num_steps += 1
    if is_due(caches.num_steps):
        try:
            save_state(caches)
        except ConfigError as error:  # answers matter more
            log.warning("expert cache: %s; trying again later", error)


def save_state(caches: ModelCaches) -> str | None:
    """Save what a restart may keep, where that is wanted; the file's name.

    A start that failed saves nothing: its slots hold what profiling asked for. Nor does a step that
    was broken off: an earlier file stays.
    """
    path = state_path(caches.options.state, caches.config.parallel_config, caches.rank)
    if path is None or not caches.has_started or caches.is_in_step:
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


def _about(caches: ModelCaches) -> warm_start.About:
    provider = next(iter(caches.providers.values()))
    mode = "device" if isinstance(provider, DeviceWeightProvider) else "host"
    return warm_start.About(caches.options.cache.policy, mode, caches.capacity, caches.digest)
