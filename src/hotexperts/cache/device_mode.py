"""Who manages a cache, the host or a kernel, and what a kernel needs for that."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hotexperts.config import AUTO, CacheConfig
from hotexperts.errors import ConfigError
from hotexperts.formats import ExpertLayout
from hotexperts.kernels.gather.layout import WORD_BYTES
from hotexperts.kernels.plan import DEVICE_POLICIES


class ChosenMode(NamedTuple):
    """Who manages the caches of a model.

    Attributes:
        mode: "host" or "device".
        reason: why "auto" came to the host, as "host: no CUDA device"; else None.
    """

    mode: str
    reason: str | None


def choose_mode(
    cache: CacheConfig,
    layouts: Sequence[ExpertLayout],
    device: torch.device,
    *,
    is_refused: bool = False,
) -> ChosenMode:
    """The mode that "auto" means here, or the one that is asked for.

    Args:
        cache: the user's choices.
        layouts: of every layer's experts.
        device: where slots go.
        is_refused: rows are not page-locked, as the system refused it; whoever asks for the
            device was told then.

    Raises:
        ConfigError: the device is asked for and cannot.
    """
    if cache.mode == "device":
        for layout in layouts:
            check_device_mode(layout, cache.policy, device)
    if cache.mode != AUTO:
        return ChosenMode(cache.mode, None)
    if not cache.has_page_locked_store:
        where = "on disk" if cache.store == "disk" else "in the file"
        return ChosenMode("host", f"host: experts stay {where}")
    if is_refused:
        return ChosenMode("host", "host: page-locking was refused")
    for layout in layouts:
        obstacle = device_obstacle(layout, cache.policy, device, may_interpret=False)
        if obstacle is not None:
            return ChosenMode("host", f"host: {obstacle.cause}")
    return ChosenMode("device", None)


def option_for_kernels(cache: CacheConfig) -> str | None:
    """The option that works with kernels alone, in words; None where the host will do."""
    if cache.mode == "device":
        return "cache_mode 'device'"
    if cache.packing == "packed12":
        return "expert_packing 'packed12'"
    return None if cache.prefetch == "off" else f"prefetch {cache.prefetch!r}"


def check_options_for_kernels(cache: CacheConfig, mode: ChosenMode) -> None:
    """Refuse options that work with kernels alone where the host manages the caches.

    Raises:
        ConfigError: packing or prefetching is asked for.
    """
    if mode.mode == "device":
        return
    if cache.packing == "packed12":
        raise ConfigError(
            f"expert_packing 'packed12' is unpacked by kernels, which do not work here "
            f"({mode.reason}): use expert_packing 'auto'"
        )
    if cache.prefetch != "off":
        raise ConfigError(
            f"prefetch {cache.prefetch!r} runs in kernels, which do not work here "
            f"({mode.reason or 'cache_mode host'}): use prefetch 'off'"
        )


class Obstacle(NamedTuple):
    """What keeps kernels from managing a cache.

    Attributes:
        cause: in a few words, for a report.
        remedy: what to do about it, for who wants kernels all the same.
    """

    cause: str
    remedy: str


def device_obstacle(
    layout: ExpertLayout, policy: str, device: torch.device, *, may_interpret: bool
) -> Obstacle | None:
    """The first thing that no kernel can do, or None where kernels can manage the cache.

    Args:
        layout: of one expert.
        policy: its name.
        device: where the slots are.
        may_interpret: Triton's interpreter will do, which is for tests: it is slow.
    """
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    odd = [spec.name for spec in layout.specs if spec.nbytes % WORD_BYTES]
    if policy not in DEVICE_POLICIES:
        remedy = f"choose one of {', '.join(DEVICE_POLICIES)}"
        return Obstacle(f"policy {policy!r} has no kernel", remedy)
    if odd:
        cause = f"tensors {odd} of an expert are no multiple of {WORD_BYTES} bytes"
        return Obstacle(cause, "use another model")
    if device.type != "cuda" and not (interprets and may_interpret):
        return Obstacle("no CUDA device", f"give one instead of {device}")
    if interprets and not may_interpret:
        return Obstacle("Triton only interprets", "unset TRITON_INTERPRET")
    if importlib.util.find_spec("triton") is None:
        return Obstacle("Triton is not installed", "install it")
    return None


def check_device_mode(layout: ExpertLayout, policy: str, device: torch.device) -> None:
    """Refuse what no kernel can do, before anything is loaded.

    Raises:
        ConfigError: a policy without a kernel, tensors whose size is no multiple of four bytes, no
            GPU (a CPU will do under Triton's interpreter), or no Triton.
    """
    obstacle = device_obstacle(layout, policy, device, may_interpret=True)
    if obstacle is not None:
        raise ConfigError(
            f"cache_mode 'device' cannot work here, {obstacle.cause}: {obstacle.remedy}, or let "
            "the host manage the cache (cache_mode='host')"
        )
