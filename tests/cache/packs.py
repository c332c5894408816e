"""A small pack, its experts in memory beside it, and reads that fail as they are told."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hotexperts.cache import CPUBackingStore
from hotexperts.cache.pack_format import PackedLayer, PackHeader
from hotexperts.cache.pack_source import SourceFile
from hotexperts.cache.pack_writer import write_pack

NUM_EXPERTS = 6


def make_stores() -> list[CPUBackingStore]:
    """Two layers of six experts, rows of two blocks and of one."""
    torch.manual_seed(0)
    return [
        CPUBackingStore.from_tensors(
            {
                "gate_up_proj": torch.randn(NUM_EXPERTS, rows, 64).bfloat16(),
                "down_proj_bias": torch.randn(NUM_EXPERTS, 7),
            }
        )
        for rows in (40, 11)
    ]


def header_of(stores: Sequence[CPUBackingStore], sources: Sequence[SourceFile] = ()) -> PackHeader:
    """Layers named `layers.0` and so on."""
    layers = [
        PackedLayer(f"layers.{index}", store.num_experts, store.layout)
        for index, store in enumerate(stores)
    ]
    return PackHeader(tuple(layers), tuple(sources))


def make_pack(path: Path) -> list[CPUBackingStore]:
    """Write one, and return what is in it."""
    stores = make_stores()
    write_pack(path, header_of(stores), stores)
    return stores


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def blank(store: Any) -> list[torch.Tensor]:
    """Where a row can be copied to."""
    return [torch.full(s.shape, 99, dtype=s.dtype) for s in store.layout.specs]


def equal(tensors: Sequence[torch.Tensor], store: CPUBackingStore, expert: int) -> bool:
    """Whether they are an expert's."""
    return all(map(torch.equal, tensors, store.row(expert)))


def failing(plan: Callable[[int], str | None]) -> Callable[[int, Sequence[Any], int], int]:
    """A `preadv` whose n-th read, from 0, fails as the plan says.

    "eio" raises, "short" reads a block less, "garbage" brings other bytes.
    """
    count = iter(range(10**9))

    def preadv(fd: int, buffers: Sequence[Any], offset: int) -> int:
        what = plan(next(count))
        if what == "eio":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        num_read = os.preadv(fd, buffers, offset)
        if what == "garbage":
            buffers[0][17] ^= 1
        return num_read - 4096 if what == "short" else num_read

    return preadv
