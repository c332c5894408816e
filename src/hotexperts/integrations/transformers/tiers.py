"""Where a model's experts live: in host memory, in the checkpoint, or on disk and some in memory.

What does not fit is refused before anything is read, with what is needed and what is available.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hotexperts.cache.disk import DiskBackingStore
from hotexperts.cache.host_memory import available_host_bytes
from hotexperts.cache.pack_file import PackFile
from hotexperts.cache.pack_format import PackedLayer, PackHeader, aligned
from hotexperts.cache.pack_source import SourceFile, check_quantisation, check_sources
from hotexperts.config import (
    DEFAULT_RAM_POLICY,
    CacheConfig,
    format_bytes,
    round_up_bytes,
    round_up_gib,
)
from hotexperts.errors import CheckpointError, ConfigError, HostMemoryError
from hotexperts.integrations.transformers.modules import ExpertsModule
from hotexperts.integrations.transformers.quantisation import quantisation_digest
from hotexperts.plain_file import other_than_file

DEFAULT_RAM_SHARE = 0.5  # of the free memory, for experts on disk: the page cache is not needed
AUTO_SHARE = (
    0.8  # of the free memory that all experts may take, before "auto" leaves them out of it
)


@dataclass(frozen=True, slots=True)
class Tier:
    """Where experts live, decided.

    Attributes:
        store: "ram", "file" or "disk".
        reason: why, and what the memory holds; None where it was asked for and that says all.
        ram_nbytes: host memory that the stores will take.
        num_rows: rows in host memory of each layer, where they are on disk.
        pack: open, where they are on disk.
    """

    store: Any
    reason: str | None
    ram_nbytes: int
    num_rows: int = 0
    pack: PackFile | None = None

    def config(self, cache: CacheConfig) -> CacheConfig:
        """The user's choices with "auto" decided.

        Raises:
            ConfigError: another choice does not go with what it came to.
        """
        if self.store == "disk":
            return replace(cache, store=self.store)
        return replace(
            cache, store=self.store, ram_nbytes=None, ram_policy=DEFAULT_RAM_POLICY, pack=None
        )


def choose_tier(
    found: Sequence[ExpertsModule], needed: int, cache: CacheConfig, files: Sequence[Path]
) -> Tier:
    """Where the experts go, as asked or as the free memory allows.

    Args:
        found: the experts modules.
        needed: host bytes of all experts in memory.
        cache: the user's choices.
        files: the checkpoint's.

    Raises:
        CheckpointError: no pack, or one that is damaged, of another model or out of date.
        StorageError: it cannot be read.
        ConfigError: a memory budget of less than a row a layer.
        HostMemoryError: a memory budget beyond what is free.
    """
    if cache.store == "file":
        return Tier("file", None, 0)
    if cache.store == "ram":
        return Tier("ram", None, needed)
    if cache.store == "disk":
        return _on_disk(found, cache, files, "disk: as asked")
    free = available_host_bytes()
    room = min(int(AUTO_SHARE * free), cache.ram_nbytes or free)
    sizes = f"{format_bytes(needed)} of experts, {format_bytes(room)} of memory for them"
    if needed <= room:
        return Tier("ram", f"ram: {sizes}", needed)
    path = pack_path(cache, found, files)
    if path.exists() or cache.pack is not None:
        return _on_disk(found, cache, files, f"disk: {sizes}")
    return Tier("file", f"file: {sizes}, and no pack (`hotexperts pack` makes one)", 0)


def disk_stores(tier: Tier, cache: CacheConfig, device: torch.device) -> list[DiskBackingStore]:
    """One store a layer of the tier's pack."""
    assert tier.pack is not None
    return [
        DiskBackingStore(
            tier.pack,
            index,
            min(tier.num_rows, layer.num_experts),
            policy=cache.ram_policy,
            pin=device.type == "cuda",
        )
        for index, layer in enumerate(tier.pack.header.layers)
    ]


def pack_header(found: Sequence[ExpertsModule], files: Sequence[Path]) -> PackHeader:
    """What a pack of these experts says of itself.

    Raises:
        CheckpointError: a file of the checkpoint cannot be read.
    """
    layers = [PackedLayer(layer.name, layer.num_experts, layer.layout) for layer in found]
    sources = tuple(SourceFile.of(file) for file in files)
    return PackHeader(tuple(layers), sources, quantisation_digest(files))


def pack_path(cache: CacheConfig, found: Sequence[ExpertsModule], files: Sequence[Path]) -> Path:
    """The pack as asked for, or where `hotexperts pack` puts one of this checkpoint and dtype.

    Raises:
        ConfigError: none was asked for, and nobody knows where the user's files go.
    """
    if cache.pack is not None:
        return Path(cache.pack)
    first = Path(files[0]).absolute()
    source = first.parent.resolve()
    if first.suffix == ".gguf":  # a folder may hold several models
        source /= first.name
    dtype = str(found[0].layout.specs[0].dtype).removeprefix("torch.")
    digest = hashlib.sha256(str(source).encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]", "_", source.name) or "model"
    return _cache_folder() / "hotexperts" / f"{name}-{digest}-{dtype}.pack"


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base) if base else Path.home() / ".cache"
    except RuntimeError as error:  # a container's user without a name
        raise ConfigError(
            "no pack can be found or made, as this user has no home folder: name it (expert_pack, "
            "--expert-pack FILE), or set HOME or XDG_CACHE_HOME"
        ) from error


def _on_disk(
    found: Sequence[ExpertsModule], cache: CacheConfig, files: Sequence[Path], why: str
) -> Tier:
    pack = _open_pack(pack_path(cache, found, files), found, files)
    available = available_host_bytes()
    strides = [aligned(layer.layout.row_nbytes) for layer in found]
    budget = cache.ram_nbytes
    if budget is None:
        budget = int(DEFAULT_RAM_SHARE * available)
    most = max(layer.num_experts for layer in found)
    num_rows = min(most, budget // sum(strides))
    if num_rows < 1:
        raise ConfigError(
            f"{format_bytes(budget)} of memory for experts on disk is less than one of each of "
            f"{len(found)} layers: give at least {round_up_bytes(sum(strides))} (expert_ram_gib, "
            f"--expert-ram-gib {round_up_gib(sum(strides))})"
        )
    needed = sum(min(num_rows, x.num_experts) * s for x, s in zip(found, strides, strict=True))
    if cache.check_host_memory and needed > available:
        raise HostMemoryError(
            f"{num_rows} experts a layer in memory need {format_bytes(needed)}, "
            f"{format_bytes(available)} is available: give less (expert_ram_gib, "
            "--expert-ram-gib), free memory, or skip this check (check_host_memory=False, "
            "--no-host-memory-check)"
        )
    cached = "" if pack.reason is None else f"; through the page cache: {pack.reason}"
    reason = f"{why}; {num_rows} of {most} experts a layer in {format_bytes(needed)} of memory"
    return Tier("disk", reason + cached, needed, num_rows, pack)


def _open_pack(path: Path, found: Sequence[ExpertsModule], files: Sequence[Path]) -> PackFile:
    if (kind := other_than_file(path)) is not None:
        raise CheckpointError(f"{path}: {kind} is there, and no pack: name a file (--expert-pack)")
    if not path.is_file():
        raise CheckpointError(
            f"{path}: there is no pack of this checkpoint: make it once with `hotexperts pack` and "
            "the --dtype of the run, or leave the experts in the checkpoint (expert_store='file', "
            "--expert-store file)"
        )
    pack = PackFile(path)
    check_sources(path, pack.header.sources, files)
    check_quantisation(path, pack.header.quantisation, quantisation_digest(files))
    wanted = [(layer.name, layer.num_experts, layer.layout) for layer in found]
    for layer, packed in zip(wanted, pack.header.layers, strict=False):
        if layer != tuple(packed):
            raise CheckpointError(
                f"{path}: holds {packed.num_experts} experts of {packed.name} as "
                f"{packed.layout.specs}, the model wants {layer[1]} of {layer[0]} as "
                f"{layer[2].specs}: make a pack of this model and dtype with `hotexperts pack`"
            )
    if len(wanted) != len(pack.header.layers):
        raise CheckpointError(
            f"{path}: holds {len(pack.header.layers)} layers, the model has {len(wanted)}: make a "
            "pack of this model with `hotexperts pack`"
        )
    return pack
