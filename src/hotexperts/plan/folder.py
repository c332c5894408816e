"""A checkpoint in safetensors, in a folder: which files are its own, and what their headers say."""

from __future__ import annotations

import re
from pathlib import Path

from hotexperts.errors import CheckpointError
from hotexperts.plan.config import read_object
from hotexperts.plan.model import TensorSize
from hotexperts.safetensors_header import read_header

INDEX = "model.safetensors.index.json"
_WANTED = "give the folder of a whole checkpoint, or its hub id; pickle is not read"
_FILE = re.compile(r"[ -.0-~]{1,240}\.safetensors")


def read_sizes(folder: Path) -> dict[str, TensorSize]:
    """Every tensor.

    Raises:
        CheckpointError: no safetensors, some of them lost, or a damaged one.
    """
    return {
        name: TensorSize(place.dtype, place.end - place.begin)
        for path in weight_files(folder)
        for name, place in read_header(path).items()
    }


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's files: those that its index names, else all but a second form of them.

    Raises:
        CheckpointError: there is none, or one of the index is lost.
    """
    if not (folder / INDEX).exists():
        files = sorted(folder.glob("*.safetensors"))
        files = [p for p in files if not p.name.startswith("consolidated")] or files
        if not files:
            gguf = sorted(folder.glob("*.gguf"))
            remedy = f"give {gguf[0]} itself" if gguf else _WANTED
            raise CheckpointError(f"{folder} has no .safetensors: {remedy}")
        return files
    names = names_of_index(folder / INDEX)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(names)} files, {missing[0]} first: download "
            "the rest"
        )
    return [folder / name for name in names]


def names_of_index(index: Path) -> list[str]:
    """The files that an index names, each a plain name.

    Raises:
        CheckpointError: it is damaged, or names something outside of its folder.
    """
    weight_map = read_object(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and _FILE.fullmatch(name) for name in names):
        raise CheckpointError(
            f"{index} is damaged (its weight_map is {weight_map!r:.80}): download it again"
        )
    return sorted(set(names))
