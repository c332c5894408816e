"""Rows that could not be page-locked: which way to copy them, and what to say of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch

from hotexperts.cache.file_store import PinnedBounce
from hotexperts.cache.host_memory import PageLockError
from hotexperts.cache.page_lock import Held
from hotexperts.cache.store import CPUBackingStore, ExpertStore
from hotexperts.config import format_bytes

_MEASURED_ROWS = 8


def reserve_bounce(row_nbytes: int) -> PinnedBounce | None:
    """Page-locked rows to copy through, to be had before the quota is used up; or None."""
    try:
        return PinnedBounce(row_nbytes)
    except PageLockError:
        return None


def settle(stores: Sequence[ExpertStore], bounce: PinnedBounce | None, device: torch.device) -> str:
    """Let stores that are not page-locked copy through the bounce rows, where that is faster.

    Args:
        stores: of all layers, filled.
        bounce: for the largest row, or None where the system refused even that.
        device: where slots are.

    Returns:
        How host memory is held, for a report; empty where no GPU reads it.
    """
    why = refusal(stores)
    if why is None:
        return _describe(stores)
    others = [x for x in stores if isinstance(x, CPUBackingStore) and not x.is_pinned]
    if not others:  # packed rows, which go straight to where they are unpacked
        return f"{_describe(stores)}; what is not page-locked is copied directly ({why})"
    speed, how = measure(others[0], device), "directly"
    if bounce is not None:
        others[0].bounce = bounce
        bounced = measure(others[0], device)
        if bounced > speed:
            speed, how = bounced, "through page-locked rows"
        for store in others:
            store.bounce = bounce if how != "directly" else None
    copied = f"what is not page-locked is copied {how} at {speed:.1f} GB/s"
    return f"{_describe(stores)}; {copied} ({why})"


def measure(store: CPUBackingStore, device: torch.device) -> float:
    """GB/s of copying a few rows to slots of the device, as the store does it now."""
    _, slots = store.layout.allocate(1, device)
    row = [tensor[0] for tensor in slots]
    for _ in range(2):  # what the first time sets up is not counted
        _wait(device)
        start = time.perf_counter()
        for i in range(_MEASURED_ROWS):
            store.copy_into(i % store.num_experts, row)
        _wait(device)
        seconds = time.perf_counter() - start
    return _MEASURED_ROWS * store.layout.nbytes / seconds / 1e9


def refusal(stores: Sequence[ExpertStore]) -> str | None:
    """Why kernels cannot read all of the rows; None where they can, or no GPU is to."""
    buffers = [getattr(store, "buffer", None) for store in stores]
    return next((b.refusal for b in buffers if b is not None and b.refusal is not None), None)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _describe(stores: Sequence[ExpertStore]) -> str:
    nbytes: Counter[Held] = Counter()
    nodes = set()
    for store in stores:
        buffer = getattr(store, "buffer", None)
        if buffer is not None:
            nbytes[buffer.held] += store.host_nbytes
            nodes.add(buffer.node)
    if not nbytes or (refusal(stores) is None and nbytes[Held.PAGEABLE]):  # no GPU
        return ""
    kinds = [kind for kind in Held if nbytes[kind]]
    amounts = [f"{format_bytes(nbytes[kind])} " if len(kinds) > 1 else "" for kind in kinds]
    text = ", ".join(f"{n}{kind.value}" for n, kind in zip(amounts, kinds, strict=True))
    numbers = sorted(node for node in nodes if node is not None)
    return text + (f", on NUMA node {', '.join(map(str, numbers))}" if numbers else "")
