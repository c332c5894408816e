"""The counters' public names and meanings, the same for every engine."""

from __future__ import annotations

PREFIX = "hotexperts_"
COUNTERS = {
    "calls": "MoE layer calls",
    "hits": "Demanded experts that had a slot when the call began",
    "misses": "Demanded experts that had none",
    "bypasses": "Misses that were served without entering the cache",
    "evictions": "Experts that gave up their slot",
    "waves": "Kernel calls over part of a demand",
    "bytes_moved": "Bytes copied from the store",
    # Of a policy with shadow caches:
    "lru_hits": "Hits that an LRU cache of as many slots would have had",
    "best_shadow_hits": "Hits of the policy's best shadow cache in each layer",
    # Where experts are on disk:
    "ram_hits": "Experts to be copied that were in host memory",
    "disk_reads": "Experts that were read from disk",
    "disk_bytes": "Bytes read from disk",
    # Where experts are prefetched:
    "prefetches": "Experts whose copy began before their layer asked",
    "prefetch_hits": "Of them, those that the layer asked for and admitted",
    "prefetch_bytes": "Bytes copied before the layer asked, among those copied from the store",
    "prefetch_saved_bytes": "Of them, those that the layer took",
}
GAUGES = {  # what is so now; it falls, too
    "prefetching_layers": "Layers whose experts are guessed and whose switch is on",
}
