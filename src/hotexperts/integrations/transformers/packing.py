"""`pack`: every expert of a checkpoint into one file, once, for experts on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from hotexperts.cache.pack_format import PackHeader, is_pack
from hotexperts.cache.pack_writer import is_whole, write_pack
from hotexperts.config import CacheConfig
from hotexperts.errors import ConfigError, UnsupportedModelError
from hotexperts.integrations.transformers.checkpoint import ExpertCheckpoint
from hotexperts.integrations.transformers.load import LoadOptions
from hotexperts.integrations.transformers.modules import ExpertsModule
from hotexperts.integrations.transformers.options import check_from_pretrained, find_dtype
from hotexperts.integrations.transformers.pretrained import from_pretrained_by_us
from hotexperts.integrations.transformers.repository import read_config
from hotexperts.integrations.transformers.tiers import pack_header, pack_path


@dataclass(frozen=True, slots=True)
class Packed:
    """A pack that is there.

    Attributes:
        path: of the file.
        nbytes: its size.
        num_rows: experts in it, of all layers.
        num_written: of them, written by this call; an earlier one wrote the others.
    """

    path: Path
    nbytes: int
    num_rows: int
    num_written: int


class _Done(Exception):  # noqa: N818 (no error: it ends a load that was never wanted)
    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self.packed = packed


def pack(
    path_or_id: str | Path,
    *,
    expert_pack: str | Path | None = None,
    dtype: str | torch.dtype = "auto",
    progress: Callable[[int, int], None] = lambda done, total: None,
    auto_class: Any = None,
    **from_pretrained: Any,
) -> Packed:
    """Write all experts of a checkpoint to one file, for `load(expert_store="disk")`.

    The file has their rows as they are computed with, quantised ones dequantised. One that is
    there, belongs to the checkpoint and has no damaged row is kept: all of it is read to know that.
    An interrupted one is gone on with.

    Args:
        path_or_id: as for `load`.
        expert_pack: the file; None is a name of the checkpoint and dtype in `~/.cache/hotexperts`
            (or in `$XDG_CACHE_HOME`), where `load` looks for it.
        dtype: as for `load`, which must be given the same.
        progress: called with (experts packed, experts in all).
        auto_class: as for `load`.
        **from_pretrained: as for `load`.

    Raises:
        ConfigError: a dtype that does not work, a file that is no pack, or another process is
            writing the same pack.
        CheckpointError: the checkpoint is incomplete or corrupt, or changes meanwhile.
        UnsupportedModelError: as for `load`.
        StorageError: the disk is full or faulty, or the folder is not to be written; nothing is
            left there then.
    """
    check_from_pretrained(from_pretrained)
    dtype = find_dtype(dtype, from_pretrained.pop("torch_dtype", None))
    config, rest = read_config(path_or_id, from_pretrained)
    rest = {"use_safetensors": True, **rest, "config": config, "dtype": dtype}
    cache = CacheConfig(store="disk", pack=None if expert_pack is None else str(expert_pack))

    def instead(
        found: Sequence[ExpertsModule], checkpoint: ExpertCheckpoint, files: Sequence[Path]
    ) -> NoReturn:
        raise _Done(_pack(pack_path(cache, found, files), found, checkpoint, files, progress))

    try:
        device = torch.device("cpu")
        from_pretrained_by_us(path_or_id, LoadOptions(cache), auto_class, device, rest, instead)
    except _Done as done:
        return done.packed
    raise UnsupportedModelError(
        f"{path_or_id}: not a Mixture-of-Experts model that hotexperts knows: load it with "
        "Transformers as it is"
    )


def _pack(
    path: Path,
    found: Sequence[ExpertsModule],
    checkpoint: ExpertCheckpoint,
    files: Sequence[Path],
    progress: Callable[[int, int], None],
) -> Packed:
    header = pack_header(found, files)
    if _is_there(path, header):
        return Packed(path, header.nbytes, header.num_rows, 0)
    stores = [checkpoint.store(layer, release_pages=True) for layer in found]
    num_kept = write_pack(
        path,
        header,
        stores,
        files=files,
        after_each=lambda num_done: progress(num_done, header.num_rows),
    )
    return Packed(path, header.nbytes, header.num_rows, header.num_rows - num_kept)


def _is_there(path: Path, header: PackHeader) -> bool:
    """Whether a pack of just this is there, undamaged; another pack of that name is replaced.

    Raises:
        ConfigError: a file that is no pack.
    """
    if path.exists() and not (path.is_file() and is_pack(path)):  # a pipe would be waited for
        raise ConfigError(
            f"{path} is there and is no pack: name another file (--expert-pack), or delete it"
        )
    return is_whole(path, header)
