"""Checks of what users give: an option takes effect, or a line says why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hotexperts.config import DEFAULT_KV_TOKENS, CacheConfig
from hotexperts.errors import CheckpointError, ConfigError, UnsupportedOperationError
from hotexperts.integrations.transformers import experts
from hotexperts.integrations.transformers.load import LoadOptions
from hotexperts.policy import POLICIES

COMPUTABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_NOT_WITH_A_CACHE = {
    **dict.fromkeys(
        ("device_map", "tp_plan", "tp_size", "distributed_config", "device_mesh"),
        "give device='cuda' or 'cpu'",
    ),
    "state_dict": "save the weights as a checkpoint, and load that",
    "config": "give the values to change by name, such as max_position_embeddings=1024",
    "experts_implementation": "give experts_algorithm",
    "gguf_file": "give the path of the file itself as the model",
    "quantization_config": "give expert_dtype to quantise experts; a checkpoint's own is read "
    "without being asked",
}


def check_from_pretrained(options: dict[str, Any]) -> None:
    """Refuse options of `from_pretrained` that a cache would break or ignore.

    Raises:
        UnsupportedOperationError: one of them.
    """
    for name, remedy in _NOT_WITH_A_CACHE.items():
        if options.get(name) is not None:
            raise UnsupportedOperationError(f"{name} does not work with an expert cache: {remedy}")


def make_options(
    cache: CacheConfig,
    algorithm: experts.Algorithm,
    kv_tokens: int | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LoadOptions:
    """The checked options.

    Raises:
        ConfigError: one that cannot take effect.
    """
    POLICIES.load(cache.policy)
    POLICIES.load(cache.ram_policy)
    if algorithm not in experts.ALGORITHMS:
        raise ConfigError(
            f"experts_algorithm is {algorithm!r}: use one of {', '.join(experts.ALGORITHMS)}"
        )
    is_chosen = kv_tokens is not None
    kv_tokens = DEFAULT_KV_TOKENS if kv_tokens is None else kv_tokens
    if isinstance(kv_tokens, bool) or not isinstance(kv_tokens, int) or kv_tokens < 1:
        raise ConfigError(f"kv_tokens is {kv_tokens!r}: give a whole number, at least 1")
    if not callable(progress):
        raise ConfigError(
            f"progress is {progress!r}: give a function of (bytes of experts loaded, bytes in all)"
        )
    return LoadOptions(cache, algorithm, kv_tokens, is_chosen, progress)


def check_path(path_or_id: Any) -> None:
    """Refuse what names neither a folder nor a repository.

    Raises:
        CheckpointError: not a path, an empty one, or a folder that does not exist.
    """
    if not isinstance(path_or_id, str | Path) or not str(path_or_id).strip():
        raise CheckpointError(f"{path_or_id!r} is no model: give a folder or a hub id")
    looks_local = isinstance(path_or_id, Path) or path_or_id.startswith((".", "/", "~"))
    if looks_local and not Path(path_or_id).is_dir():
        raise CheckpointError(
            f"{path_or_id}: no such folder: give one that exists, or a hub id such as org/model"
        )


def find_device(device: Any) -> torch.device:
    """The device that is meant; None is CUDA where there is one.

    Raises:
        ConfigError: no device, or one that is not here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device!r} is not one: use 'cuda', 'cuda:N' or 'cpu'") from error
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not supported: use 'cuda', 'cuda:N' or 'cpu'")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r}: this torch sees no CUDA device; use 'cpu'")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {device!r}: this torch sees {torch.cuda.device_count()} CUDA devices: give a "
            "lower number"
        )
    return found


def find_dtype(dtype: Any, torch_dtype: Any = None) -> Any:
    """The dtype that is meant, or "auto".

    Args:
        dtype: of `load`.
        torch_dtype: Transformers' older name for it.

    Raises:
        ConfigError: both, or one in which torch does not compute.
    """
    if torch_dtype is not None:
        if dtype != "auto":
            raise ConfigError("give dtype or torch_dtype, which is its older name, not both")
        dtype = torch_dtype
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    is_auto = isinstance(dtype, str) and dtype == "auto"
    if not is_auto and not any(found is computable for computable in COMPUTABLE):
        names = ", ".join(repr(str(x).removeprefix("torch.")) for x in COMPUTABLE)
        raise ConfigError(f"dtype {dtype!r} does not work: use 'auto', or one of {names}")
    return "auto" if is_auto else found
