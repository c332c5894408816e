"""Where a model's facts are: a folder, a GGUF file, or the hub."""

from __future__ import annotations

from pathlib import Path

from hotexperts.errors import CheckpointError
from hotexperts.plan.config import read_config
from hotexperts.plan.folder import read_sizes
from hotexperts.plan.gguf import read_gguf
from hotexperts.plan.hub import is_id, read_repository
from hotexperts.plan.model import ModelFacts, facts_of

_MOST_NAME_NBYTES = 255  # of a file, in common file systems; a path has several


def read_facts(model: str | Path) -> ModelFacts:
    """The facts of a model; no weights are read.

    Args:
        model: a folder with config.json and safetensors, a .gguf file, or a hub id.

    Raises:
        CheckpointError: none of these, or damaged, or out of reach.
        UnsupportedModelError: no Mixture-of-Experts model.
        ModuleNotFoundError: the package that reads it is not installed.
    """
    name, path = str(model), Path(model)
    if (
        not name
        or "\0" in name
        or any(len(part.encode(errors="surrogatepass")) > _MOST_NAME_NBYTES for part in path.parts)
    ):
        raise CheckpointError(
            f"{name!r:.80} is no name of a model: give a folder, a .gguf file, or a hub id such as "
            "org/model"
        )
    if path.suffix == ".gguf" and not path.is_dir():
        return facts_of(name, *read_gguf(path), is_gguf=True)
    if path.is_dir():
        config = read_config(path / "config.json")
        return facts_of(name, config, read_sizes(path))
    if path.exists() or not is_id(name):
        raise CheckpointError(
            f"{name}: no such folder: give one with config.json and .safetensors files, a .gguf "
            "file, or a hub id"
        )
    return facts_of(name, *read_repository(name))
