"""The heart: slots on the GPU, stores on the host, and the provider between them."""

from hotexperts.cache.cached import CachedWeightProvider
from hotexperts.cache.disk import DiskBackingStore
from hotexperts.cache.file_store import FileStore
from hotexperts.cache.provider import (
    ExpertWeightProvider,
    ExpertWeightResult,
    FullGPUProvider,
)
from hotexperts.cache.slots import GPUSlotManager
from hotexperts.cache.store import CPUBackingStore, ExpertStore
from hotexperts.cache.transfer import StreamBanks
from hotexperts.errors import ExpertCacheOverflow

__all__ = [
    "CPUBackingStore",
    "CachedWeightProvider",
    "DiskBackingStore",
    "ExpertCacheOverflow",
    "ExpertStore",
    "ExpertWeightProvider",
    "ExpertWeightResult",
    "FileStore",
    "FullGPUProvider",
    "GPUSlotManager",
    "StreamBanks",
]
