"""A checkpoint's folder, file or hub repository: its configuration, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from hotexperts.errors import CheckpointError, UnsupportedModelError
from hotexperts.integrations.transformers.gguf_checkpoint import ATTRIBUTE as GGUF
from hotexperts.integrations.transformers.gguf_checkpoint import find_gguf
from hotexperts.integrations.transformers.gguf_config import read_gguf_config
from hotexperts.integrations.transformers.options import check_path
from hotexperts.integrations.transformers.plain_view import ATTRIBUTE as PACKED
from hotexperts.integrations.transformers.plain_view import take_quantisation
from hotexperts.integrations.transformers.schemes import METHODS

_HUB_SECONDS = 10
DEQUANTISED = ("fp8", "mxfp4")
_READ = ("fp8", "mxfp4", "gptq", "awq", "compressed-tensors")
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
    """The model's configuration; quantised weights are asked to be dequantised on loading.

    Args:
        path_or_id: as for `load`.
        options: `from_pretrained`'s; those named like a value of the configuration change it, as
            they do there.

    Returns:
        The configuration, and the options that are still for `from_pretrained`.

    Raises:
        CheckpointError: there is no configuration at that path or id, or the hub is out of reach;
            or it is not sound about packed weights, or a GGUF file is damaged.
        UnsupportedModelError: quantised in a way that is not dequantised, or a GGUF file of an
            architecture that is not read.
    """
    from transformers import AutoConfig

    gguf = find_gguf(path_or_id)
    if gguf is not None:
        return read_gguf_config(gguf, options)
    check_path(path_or_id)
    _require_config(path_or_id, options)
    finding = {name: options[name] for name in _FIND_OPTIONS if name in options}
    trust = bool(options.get("trust_remote_code"))
    try:
        config, rest = AutoConfig.from_pretrained(
            path_or_id, return_unused_kwargs=True, **{**options, "trust_remote_code": trust}
        )
    except (OSError, ValueError) as error:
        where = f"{path_or_id}: "
        if not Path(path_or_id).is_dir():
            where += "neither a folder nor a readable hub id: "
        raise CheckpointError(_once(where, first_line(error))) from error
    for part in (config, config.get_text_config(decoder=True)):
        for mark in (PACKED, GGUF):  # ours to set, and never what a config.json says
            if hasattr(part, mark):
                delattr(part, mark)
    _dequantise(path_or_id, config)
    for name in ("_from_auto", "_commit_hash"):
        rest.pop(name, None)
    return config, {**rest, **finding, "trust_remote_code": trust}


def _require_config(path_or_id: str | Path, options: dict[str, Any]) -> None:
    """Refuse what has no `config.json`, at once.

    Raises:
        CheckpointError: the folder has none; or it is no folder, and the hub does not answer.
    """
    name = "/".join(part for part in (options.get("subfolder"), "config.json") if part)
    if Path(path_or_id).is_dir():
        if not (Path(path_or_id) / name).is_file():
            raise CheckpointError(
                f"{path_or_id}: holds no {name}: give the folder of a checkpoint (config.json, "
                "*.safetensors and the tokenizer's files)"
            )
    elif not options.get("local_files_only"):
        _require_hub(path_or_id, name, options)


def _require_hub(path_or_id: str | Path, name: str, options: dict[str, Any]) -> None:
    """Ask the hub once for a file that is not here; Transformers would ask for half a minute."""
    where = {key: options.get(key) for key in ("cache_dir", "revision")}
    try:
        if not isinstance(try_to_load_from_cache(str(path_or_id), name, **where), str):
            url = hf_hub_url(str(path_or_id), name, revision=options.get("revision"))
            get_hf_file_metadata(url, token=options.get("token"), timeout=_HUB_SECONDS)
    except (HfHubHTTPError, HFValidationError):  # an answer: Transformers finds words for it
        return
    except Exception as error:  # of whichever HTTP client this version of the hub's package has
        raise CheckpointError(
            f"{path_or_id}: no such folder here, and the hub cannot be reached to look for a model "
            f"of that name ({first_line(error)}): mend the path or the network "
            "(HF_HUB_OFFLINE=1 takes what was downloaded)"
        ) from error


def _dequantise(path_or_id: str | Path, config: Any) -> None:
    parts = config, config.get_text_config(decoder=True)
    found = [getattr(part, "quantization_config", None) for part in parts]
    quantization = found[0] or found[1]
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method in METHODS:
        take_quantisation(config, quantization, path_or_id)
        return
    if method not in DEQUANTISED:
        raise UnsupportedModelError(
            f"{path_or_id}: quantised by {method!r}, which an expert cache on Transformers does "
            f"not read: take a plain checkpoint, one of {', '.join(_READ)}, or serve this one with "
            "vLLM"
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
                f"{names[0]}: download the checkpoint again, or give the folder of this model"
            )


def why_unreadable(path_or_id: str | Path, subfolder: str, error: OSError) -> str:
    """What to say when Transformers did not find the files it wants."""
    folder = Path(path_or_id) / subfolder
    if any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors")):
        return (
            f"{path_or_id}: holds pickle files, which are never read because they can run code: "
            "convert them to safetensors (save_pretrained writes them)"
        )
    if folder.is_dir() and not any(folder.glob("*.safetensors*")):
        return (
            f"{path_or_id}: has a configuration but holds no weights: give a folder with the "
            "checkpoint's *.safetensors files as well"
        )
    return _once(f"{path_or_id}: ", first_line(error))


def not_of_the_class(config: Any, auto_class: Any) -> str:
    """What to say of a model that the class asked for cannot load."""
    wanted = "AutoModelForCausalLM" if auto_class is None else auto_class.__name__
    return (
        f"{wanted} loads no {config.model_type} model: give load(auto_class=...) the class that "
        "does, such as AutoModelForImageTextToText; the commands load causal language models alone"
    )


def _once(where: str, message: str) -> str:
    """The message begun with the place, unless it says that already."""
    return message if where.strip(": ") in message else f"{where}{message}"


def first_line(error: BaseException) -> str:
    """An error's text without its further paragraphs."""
    return str(error).strip().split("\n")[0]
