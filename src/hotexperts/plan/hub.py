"""A model of the hub: its configuration and the headers of its safetensors, in a few requests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotexperts.errors import CheckpointError
from hotexperts.plan.config import Config, read_config
from hotexperts.plan.folder import read_sizes, weight_files
from hotexperts.plan.model import TensorSize
from hotexperts.safetensors_header import checked_place

_ID = re.compile(r"(?:\b[\w.-]{1,96}\b/)?\b[\w.-]{1,96}\b", re.ASCII)
_HUB_SECONDS = 10
_LOG_IN = "give a token that may read it (hf auth login, or HF_TOKEN)"


def is_id(text: str) -> bool:
    """Whether a hub id may look so."""
    return (
        _ID.fullmatch(text) is not None
        and not any(part in text for part in ("..", "--"))
        and not text.endswith(".git")
    )


def read_repository(repo_id: str) -> tuple[Config, dict[str, TensorSize]]:
    """The configuration and every tensor: from the cache if all of it is there, else from the hub.

    Raises:
        CheckpointError: no such model, no right to see it, no safetensors, or no answer.
        ModuleNotFoundError: huggingface_hub is not installed.
    """
    folder = _cached(repo_id)
    if folder is not None:
        return read_config(folder / "config.json"), read_sizes(folder)
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.utils import are_progress_bars_disabled as are_off
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    had_bars = not are_off()
    disable_progress_bars()
    try:
        url = hf_hub_url(repo_id, "config.json")
        get_hf_file_metadata(url, timeout=_HUB_SECONDS)  # once; the others try for half a minute
        config = read_config(Path(hf_hub_download(repo_id, "config.json")))
        files = HfApi().get_safetensors_metadata(repo_id).files_metadata
    except CheckpointError:
        raise
    except Exception as error:  # of the hub's package, its HTTP client, or over a damaged answer
        raise CheckpointError(f"{repo_id}: {_why(repo_id, error)}") from error
    finally:
        if had_bars:
            enable_progress_bars()
    return config, dict(_sizes(repo_id, files))


def _cached(repo_id: str) -> Path | None:
    """Where all of the checkpoint's files are, if they are."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo_id, "config.json")
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    try:
        weight_files(folder)
    except CheckpointError:
        return None
    return folder


def _sizes(repo_id: str, files: dict[str, Any]) -> Iterator[tuple[str, TensorSize]]:
    for file, header in files.items():
        for name, tensor in header.tensors.items():
            value = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": list(tensor.data_offsets),
            }
            place = checked_place(f"{repo_id}/{file}", name, value, 0, None)
            yield name, TensorSize(place.dtype, place.end - place.begin)


def _why(repo_id: str, error: BaseException) -> str:
    """What to say of it, and what to do."""
    from huggingface_hub import errors

    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, errors.GatedRepoError):
            return f"it has terms: accept them on its page on the hub, then {_LOG_IN}"
        if isinstance(cause, errors.RepositoryNotFoundError):
            return (
                "neither a folder here nor a model of the hub, or a private one: "
                f"check the name, or {_LOG_IN}"
            )
        if isinstance(cause, errors.RemoteEntryNotFoundError):
            return "the hub's repository has no config.json: give that of a model"
        if isinstance(cause, errors.NotASafetensorsRepoError):
            return "the hub's repository has no safetensors: download a GGUF file and give its path"
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return (
                "neither a folder here nor whole in the hub's cache, and HF_HUB_OFFLINE is set: "
                "unset it, or download the model"
            )
        if isinstance(cause, errors.HfHubHTTPError) and cause.response is not None:
            status = cause.response.status_code
            remedy = _LOG_IN if status in (401, 403) else "try again later"
            return f"the hub answers {status}: {remedy}"
    if any(_is_no_answer(cause) for cause in causes):
        return (
            "neither a folder here nor whole in the hub's cache, and the hub cannot be reached "
            f"({_first_line(causes[-1])}): check the name and the connection"
        )
    return (
        f"the hub's answer is damaged ({type(error).__name__}: {_first_line(error)}): try again "
        "later, or download the model and give its folder"
    )


def _is_no_answer(error: BaseException) -> bool:
    """Of the socket, or of whichever HTTP client this version of the hub's package has."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    return isinstance(error, ConnectionError | TimeoutError | LocalEntryNotFoundError) or any(
        kind.__name__ in ("TransportError", "RequestException") for kind in type(error).__mro__
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it came from."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
