"""A checkpoint's folder or hub repository: its configuration, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotexperts.errors import CheckpointError, UnsupportedModelError
from hotexperts.integrations.transformers.options import check_path

DEQUANTISED = ("fp8", "mxfp4")
_FIND_OPTIONS = (  # those that say where files are: for the configuration and for the weights
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)


def read_config(path_or_id: str | Path, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model's configuration; quantised experts are asked to be dequantised on loading.

    Args:
        path_or_id: as for `load`.
        options: `from_pretrained`'s; those named like a value of the configuration change it, as
            they do there.

    Returns:
        The configuration, and the options that are still for `from_pretrained`.

    Raises:
        CheckpointError: there is no configuration at that path or id.
        UnsupportedModelError: quantised in a way that is not dequantised.
    """
    from transformers import AutoConfig

    check_path(path_or_id)
    finding = {name: options[name] for name in _FIND_OPTIONS if name in options}
    trust = bool(options.get("trust_remote_code"))
    try:
        config, rest = AutoConfig.from_pretrained(
            path_or_id, return_unused_kwargs=True, **{**options, "trust_remote_code": trust}
        )
    except (OSError, ValueError) as error:
        what = "" if Path(path_or_id).is_dir() else "neither a folder nor a readable hub id: "
        raise CheckpointError(f"{path_or_id}: {what}{first_line(error)}") from error
    _dequantise(path_or_id, getattr(config, "quantization_config", None))
    for name in ("_from_auto", "_commit_hash"):
        rest.pop(name, None)
    return config, {**rest, **finding, "trust_remote_code": trust}


def _dequantise(path_or_id: str | Path, quantization: Any) -> None:
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method not in DEQUANTISED:
        raise UnsupportedModelError(
            f"{path_or_id}: quantised by {method!r}; an expert cache on Transformers loads plain "
            f"weights and {', '.join(DEQUANTISED)} checkpoints, which it dequantises"
        )
    quantization["dequantize"] = True


def require_complete(path_or_id: str | Path, info: dict[str, Any]) -> None:
    """Transformers fills missing weights with random numbers and only warns.

    Raises:
        CheckpointError: it did.
    """
    for kind in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info.get(kind) or ())
        if names:
            raise CheckpointError(
                f"{path_or_id}: {len(names)} {kind.replace('_keys', '')} tensors, first "
                f"{names[0]}: the checkpoint is incomplete, or of another model"
            )


def why_unreadable(path_or_id: str | Path, subfolder: str, error: OSError) -> str:
    """What to say when Transformers did not find the files it wants."""
    folder = Path(path_or_id) / subfolder
    if any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors")):
        return (
            f"{path_or_id}: holds pickle files, which are never read because they can run code: "
            "convert them to safetensors (save_pretrained writes them)"
        )
    return f"{path_or_id}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """An error's text without its further paragraphs."""
    return str(error).strip().split("\n")[0]
