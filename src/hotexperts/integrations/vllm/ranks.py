"""What ranks that each have a part of every expert share: as many slots, and equal decisions."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.cache.streaming import StreamingProvider
from hotexperts.errors import RanksDifferError
from hotexperts.kernels.plan import Counter

FACTOR = 6364136223846793005  # odd, so that no word of 64 bits loses what another one had


def largest_of_ranks(value: int) -> int:
    """The largest of all tensor-parallel ranks, which all must ask at the same time."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return value
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group.cpu_group)
    return int(found)


def same_on_all_ranks(providers: Iterable[StreamingProvider]) -> bool:
    """Whether all tensor-parallel ranks' caches hold and know the same.

    To be asked on all of them at the same time.
    """
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return True
    mine = torch.stack([fingerprint(provider).cpu() for provider in providers])
    extremes = torch.stack([mine, ~mine])  # ~x falls as x grows
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group.cpu_group)
    return torch.equal(extremes[0], ~extremes[1])


class RankCheck:
    """Compares what all ranks know after each step, on the device; the host waits for nothing.

    Args:
        names: of the layers, the same on all ranks.
        device: of their caches.
        group: of `torch.distributed`, for tensors there.
    """

    def __init__(self, names: Iterable[str], device: torch.device, group: Any) -> None:
        self._names = list(names)
        self._group = group
        self._differs = torch.zeros(len(self._names), dtype=torch.bool, device=device)
        self._on_its_way: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def after_step(self, providers: Iterable[StreamingProvider]) -> None:
        """To be called on every rank after the same steps.

        Args:
            providers: of the layers, in order.

        Raises:
            RanksDifferError: in this step or an earlier one; the layers are named.
        """
        mine = torch.stack([fingerprint(provider) for provider in providers])
        extremes = torch.stack([mine, ~mine])  # ~x falls as x grows
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        self._differs |= extremes[0] != ~extremes[1]
        self._raise_when_known()

    def _raise_when_known(self) -> None:
        if self._on_its_way is None:
            event = torch.cuda.Event() if self._differs.is_cuda else None
            found = torch.empty_like(self._differs, device="cpu", pin_memory=event is not None)
            found.copy_(self._differs, non_blocking=True)
            if event is not None:
                event.record()
            self._on_its_way = found, event
        found, event = self._on_its_way
        if event is not None and not event.query():
            return
        self._on_its_way = None
        names = [name for name, differs in zip(self._names, found.tolist(), strict=True) if differs]
        if names:
            raise RanksDifferError(
                f"ranks decided differently in {', '.join(names)}: they were given different ids "
                "or slots. Please report this model; to leave check_ranks out only hides it"
            )


def fingerprint(provider: StreamingProvider) -> torch.Tensor:
    """Who is in which slot, what the policy knows and what was counted, as an int64 scalar."""
    if not isinstance(provider, DeviceWeightProvider):
        known = json.dumps([provider.state(), provider.stats.as_dict()], sort_keys=True)
        return torch.tensor(zlib.crc32(known.encode()))
    # How far prefetches came is a matter of time, and each rank has its own.
    counters = provider.kernel.counters[: Counter.AHEAD]
    words = torch.cat([provider.slots.words.long(), counters])
    # Each word has a factor of its own, so that words that changed places are seen.
    mixed = words * (torch.arange(1, 2 * len(words), 2, device=words.device) * FACTOR)
    return ((mixed ^ (mixed >> 31)) * FACTOR).sum()


def check_of(caches: Any) -> RankCheck | None:
    """The check of a model's caches, made when first asked for; None where none is wanted."""
    if caches.rank_check is None and caches.options.check_ranks and caches.layers:
        from vllm.distributed.parallel_state import get_tp_group

        first = next(iter(caches.providers.values()))
        device = first.slot_buffer.device
        caches.rank_check = RankCheck(caches.layers, device, get_tp_group().device_group)
    found: RankCheck | None = caches.rank_check
    return found
