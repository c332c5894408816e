"""Options that `run` and `verify` share, and the checks that need neither torch nor a model."""

from __future__ import annotations

import math
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from hotexperts.config import AUTO
from hotexperts.errors import CheckpointError, ConfigError
from hotexperts.policy import POLICIES

DEMO_MODEL = "demo_model"


class Store(str, Enum):
    """Where the experts live; the names of `load(expert_store=...)`."""

    RAM = "ram"
    FILE = "file"


class Dtype(str, Enum):
    """Of the weights; AUTO is the checkpoint's."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


Model = Annotated[
    str | None,
    typer.Argument(
        help="Folder with a safetensors checkpoint, or a hub id; the demonstration model that "
        "comes with the package where left out.",
        show_default=False,
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        help=f"Which expert leaves: {', '.join(POLICIES.names())}, or 'module:Class'.",
        metavar="NAME",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cuda, cuda:N or cpu; CUDA where there is one.", metavar="NAME", show_default=False
    ),
]
ExpertStore = Annotated[
    Store,
    typer.Option(help="Copy all experts into host memory, or leave them in the checkpoint file."),
]
WeightsDtype = Annotated[Dtype, typer.Option("--dtype", help="Of the weights.")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint."),
]
NoHostMemoryCheck = Annotated[
    bool,
    typer.Option(
        "--no-host-memory-check", help="Load even if the host seems to have too little memory."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def model_path(model: str | None) -> str:
    """The model as given, or the folder of the one inside the package.

    Raises:
        CheckpointError: a path that is no folder; or none given, and the package has none.
    """
    if model is not None:
        path = Path(model)
        if path.is_file():
            raise CheckpointError(f"{model} is a file: give the folder of the checkpoint")
        if model.startswith((".", "/", "~")) and not path.is_dir():
            raise CheckpointError(f"{model}: no such folder")
        return model
    folder = Path(str(resources.files("hotexperts"))) / DEMO_MODEL
    if not folder.is_dir():
        raise CheckpointError(
            "no MODEL given, and this installation has no demonstration model: give a folder "
            "or a hub id"
        )
    return str(folder)


def cache_size(size: str | None, gib: float | None) -> str:
    """`--expert-cache-size` and `--expert-cache-gib` as one value for `load`.

    Raises:
        ConfigError: both given, or no budget at all.
    """
    if gib is None:
        return AUTO if size is None else size
    if size is not None:
        raise ConfigError("give --expert-cache-size or --expert-cache-gib, not both")
    if not math.isfinite(gib) or gib <= 0:
        raise ConfigError(f"--expert-cache-gib is {gib:g}: give more than 0, for example 6")
    return f"{max(1, int(gib * 2**30))}B"
