"""A layer's experts go into host memory, plain or packed."""

from __future__ import annotations

from typing import TypeAlias

import torch

from hotexperts.cache import CPUBackingStore
from hotexperts.cache.device_mode import ChosenMode
from hotexperts.cache.host_memory import PageLockError
from hotexperts.cache.packed_store import PackedBackingStore, check_packable, packs
from hotexperts.config import CacheConfig
from hotexperts.errors import ConfigError
from hotexperts.formats import ExpertLayout
from hotexperts.integrations.vllm.options import flag
from hotexperts.sizing import LayerShape

Store: TypeAlias = "CPUBackingStore | PackedBackingStore"


def store_of(
    cache: CacheConfig,
    tensors: dict[str, torch.Tensor],
    device: torch.device,
    plain: CPUBackingStore | None,
    *,
    capacity: int,
) -> Store:
    """Of a layer's tensors, page-locked where the slots are on a GPU.

    Args:
        cache: its packing.
        tensors: `[E, *shape]` of all experts, by name.
        device: where the slots will be.
        plain: a store that the tensors are in already; None without.
        capacity: slots of a layer.

    Raises:
        ConfigError: they are to be packed and can not be.
        HostMemoryError: page-locking was refused.
    """
    is_gpu = device.type == "cuda"
    mode = ChosenMode("device", None) if is_gpu else ChosenMode("host", "host: no CUDA device")
    is_full = capacity >= len(next(iter(tensors.values())))
    try:
        check_packable(cache, [ExpertLayout.of(tensors)[0]])
        if packs(cache, mode, device, is_full=is_full):
            return PackedBackingStore.from_tensors(tensors, device, pin=is_gpu)
        return plain or CPUBackingStore.from_tensors(tensors, pin=is_gpu)
    except PageLockError as error:
        raise error.needed_by(flag("size"), "leave the cache off") from error
    except ConfigError as error:
        raise ConfigError(f"{flag('options')}: packing: {error}") from error


def shape_of(store: Store, top_k: int) -> LayerShape:
    """What sizes are reckoned from."""
    return LayerShape(store.num_experts, top_k, store.layout.row_nbytes)
