"""`model.expert_cache`: what a user may ask of a cached model, and what the model may not do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hotexperts.cache import CachedWeightProvider, StreamBanks
from hotexperts.errors import UnsupportedOperationError
from hotexperts.stats import CacheStats, total

_REFUSED = {
    "save_pretrained": "would write a checkpoint without its experts: copy the original instead",
    "push_to_hub": "would upload a checkpoint without its experts",
    "add_adapter": "and training need the experts as parameters: load without an expert cache",
    "load_adapter": "needs the experts as parameters: load without an expert cache",
}


@dataclass(frozen=True)
class ExpertCache:
    """The caches of one model's layers.

    Attributes:
        names: the experts modules' paths, in layer order.
        providers: their caches, same order.
        capacity: slots a layer.
        policy: its name.
        store: "ram" or "file".
        reason: where the capacity comes from, one line.
        banks: the streaming banks, one pair a layout.
        load_seconds: wall-clock seconds of loading.
    """

    names: tuple[str, ...]
    providers: tuple[CachedWeightProvider, ...]
    capacity: int
    policy: str
    store: str
    reason: str
    banks: tuple[StreamBanks, ...]
    load_seconds: float

    @property
    def stats(self) -> CacheStats:
        """Counters summed over layers, a snapshot."""
        return total(provider.stats for provider in self.providers)

    @property
    def slot_nbytes(self) -> int:
        """Device bytes of all slots."""
        return sum(provider.slots.nbytes for provider in self.providers)

    @property
    def bank_nbytes(self) -> int:
        """Device bytes of the banks."""
        return sum(bank.nbytes for bank in self.banks)

    @property
    def host_nbytes(self) -> int:
        """Host bytes of the stores; 0 where the experts stay in the file."""
        return sum(provider.store.host_nbytes for provider in self.providers)

    @property
    def expert_nbytes(self) -> int:
        """Bytes of every expert of the model, as resident it would need them."""
        return sum(p.store.num_experts * p.store.layout.nbytes for p in self.providers)

    def reset_stats(self) -> None:
        """Set the counters to zero; the slots keep their experts."""
        for provider in self.providers:
            provider.stats.reset()

    def reset(self) -> None:
        """Empty the slots, and forget the policy's history and the counters."""
        for provider in self.providers:
            provider.reset()


def guard(model: nn.Module, experts: Sequence[nn.Module]) -> None:
    """Make the model refuse, with the reason, what would break it without a word."""
    for name, reason in _REFUSED.items():
        if hasattr(model, name):
            setattr(model, name, partial(_refuse, name, reason))
    model.train = partial(_train, model)
    for module in (model, *experts):
        module._apply = partial(_apply, model, module._apply)
    model.requires_grad_(False)


def _refuse(name: str, reason: str, *args: Any, **kwargs: Any) -> None:
    raise UnsupportedOperationError(f"{name}() of a model with an expert cache {reason}")


def _train(model: nn.Module, mode: bool = True) -> nn.Module:
    if mode:
        _refuse("train", "cannot work, its experts are not parameters: load without a cache")
    return nn.Module.train(model, mode=False)


def _apply(
    model: nn.Module,
    apply: Callable[..., nn.Module],
    fn: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool = True,
) -> nn.Module:
    """`.to()`, `.cuda()`, `.half()` and their like: only where they change nothing."""
    for tensor in model.parameters():
        probe = tensor.new_empty(0)
        moved = fn(probe)
        if (moved.device, moved.dtype) != (probe.device, probe.dtype):
            _refuse(
                "to",
                f"cannot move it from {probe.device}, {probe.dtype} to {moved.device}, "
                f"{moved.dtype}: its slots stay where they are; give device and dtype to load()",
            )
    return apply(fn, recurse)
