"""Options that several commands share, and checks that need no torch and no model."""

from __future__ import annotations

import math
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from hotexperts import demo
from hotexperts.config import AUTO, parse_bytes
from hotexperts.errors import CheckpointError, ConfigError
from hotexperts.plain_file import other_than_file
from hotexperts.policy import POLICIES

_MOST_GIB = 2**20


class Dtype(str, Enum):
    """Of the weights; AUTO is the checkpoint's."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Folder with a safetensors checkpoint, a .gguf file, or a hub id.",
        show_default="the demonstration model inside the package",
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        help=f"Which expert leaves: {', '.join(POLICIES.names())}, or 'module:Class'.",
        metavar="NAME",
    ),
]
CacheSize = Annotated[
    str | None,
    typer.Option(
        metavar="N|auto|SIZE",
        help="Slots a layer; 'auto' takes what the free memory holds; a size such as 6GiB is the "
        "budget of the whole model.",
        show_default="auto",
    ),
]
CacheGib = Annotated[
    float | None,
    typer.Option(
        metavar="G",
        help="Budget of the whole model in GiB: the same as --expert-cache-size GGiB.",
        show_default=False,
    ),
]
CacheState = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Start with the experts and the history of this file, if it is there, and save them "
        "to it at the end.",
        show_default=False,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens of prompt and answer together; a budget leaves room for them.",
        show_default="4096, or as many as the model has positions",
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Apply the chat template.",
        show_default="where the tokenizer has one",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Stop each answer after as many tokens.")]
ExpertMb = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Size of a trace's expert, 10^6 bytes.",
        show_default="expert_nbytes of the trace's meta data",
    ),
]
Jobs = Annotated[int, typer.Option(min=1, help="Processes that replay a trace.")]
Device = Annotated[
    str | None,
    typer.Option(
        help="cuda, cuda:N or cpu.", metavar="NAME", show_default="cuda where there is one"
    ),
]
ExpertPack = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The pack of the experts.",
        show_default="a name of the checkpoint's in ~/.cache/hotexperts",
    ),
]
WeightsDtype = Annotated[
    Dtype, typer.Option("--dtype", help="Dtype of the weights; auto is the checkpoint's.")
]
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


def model_label(path: str) -> str:
    """How reports name the model: its path or id, or that it is the one inside the package."""
    return "the demonstration model" if path == str(demo.FOLDER) else path


def model_path(model: str | None) -> str:
    """The model as given, or the folder of the one inside the package.

    Raises:
        CheckpointError: a path that is no folder; or none given, and the package has none.
    """
    if model is not None:
        path = Path(model)
        if path.suffix == ".gguf" and path.is_file():
            return model
        if path.is_file():
            raise CheckpointError(
                f"{model} is a file: give the folder of the checkpoint, or a .gguf file"
            )
        if model.startswith((".", "/", "~")) and not path.is_dir():
            raise CheckpointError(
                f"{model}: no such folder: give one that exists, or a hub id such as org/model"
            )
        return model
    return str(demo.demo_model_path())


def check_text(text: str, where: str) -> str:
    """The text, if it is text.

    Raises:
        ConfigError: bytes that are not UTF-8, which Python keeps as half characters.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where} is not valid UTF-8 (character {error.start}): give it in that encoding"
        ) from error
    return text


def stdin_text() -> str:
    """All that comes on stdin.

    Raises:
        ConfigError: it is closed, or no text.
    """
    if sys.stdin is None:  # closed by who called: Python then has none
        raise ConfigError("stdin is closed: give it a text, or name one on the command line")
    try:
        return check_text(sys.stdin.read(), "the text on stdin")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the text on stdin is not valid {error.encoding}: give it in that encoding"
        ) from error


def check_output(option: str, name: str) -> None:
    """Refuse before the long part what could not be written after it.

    Raises:
        ConfigError: a folder, a pipe or a device, or a file in a folder that is not there or
            read-only.
    """
    path = Path(name)
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {name}: no such folder: make it, or name another file")
    if not name or path.is_dir():
        raise ConfigError(f"{option} {name!r} is a folder: name a file in it")
    if (kind := other_than_file(path)) is not None:
        raise ConfigError(f"{option} {name}: {kind} is there: name a file")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"{option} {name}: not writable: name another file, or change its rights")


def context(wanted: int | None, default: int, positions: int | None) -> int:
    """Tokens of prompt and answer: as wanted, or the default, or less where a model has fewer.

    Raises:
        ConfigError: more is wanted than the model has positions.
    """
    if positions is None:
        return wanted or default
    if wanted is not None and wanted > positions:
        raise ConfigError(
            f"--context is {wanted}, the model has {positions} positions: give at most {positions}"
        )
    return wanted or min(default, positions)


def nbytes(option: str, size: str) -> int:
    """Bytes of a size such as 6GiB.

    Raises:
        ConfigError: it is none; the option is named.
    """
    try:
        return parse_bytes(size)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def given_names(call: typer.Context) -> list[str]:
    """The parameters that are on the command line, in the order of the help."""
    names = [str(parameter.name) for parameter in call.command.params]
    sources = {name: call.get_parameter_source(name) for name in names}
    return [name for name, found in sources.items() if found and found.name == "COMMANDLINE"]


def option_of(name: str) -> str:
    """A parameter as users write it."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


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
    if gib > _MOST_GIB:
        raise ConfigError(f"--expert-cache-gib is {gib:g}, more than any GPU has: give less")
    return f"{max(1, int(gib * 2**30))}B"
