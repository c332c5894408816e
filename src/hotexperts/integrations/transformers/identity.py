"""Which model it is: two checkpoints of one shape route differently, or read bytes differently."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hotexperts.errors import CheckpointError
from hotexperts.plain_file import plain

_MOST_VALUES = 64  # of a tensor
_NUM_DIGITS = 16


def model_digest(model: Any, experts: Iterable[str]) -> str:
    """A digest of a model that another checkpoint has not, from a few values of many weights.

    Of the layers that have experts, all parameters but those count: routers, attention, norms. They
    come from the checkpoint, where an embedding may be tied or resized.

    Args:
        model: loaded, without its experts.
        experts: paths of its experts modules.

    Returns:
        16 hexadecimal digits, the same on every device.
    """
    layers = {name.rpartition(".")[0].rpartition(".")[0] for name in experts}
    found = {
        f"{layer}.{name}": parameter
        for layer in sorted(layers)
        for name, parameter in model.get_submodule(layer).named_parameters()
        if not parameter.is_meta
    }
    return _digest(found)


def quantisation_digest(files: Sequence[Path]) -> str | None:
    """A digest of the `quantization_config` that says how a checkpoint's bytes are read.

    It is in `config.json` beside the files; a GGUF file says it itself, in its header.

    Args:
        files: the checkpoint's.

    Returns:
        64 hexadecimal digits, the same in whatever order its fields come; None without any.

    Raises:
        CheckpointError: the configuration cannot be read.
    """
    path = files[0].with_name("config.json")
    if files[0].suffix == ".gguf" or not path.exists():
        return None
    try:
        values = json.loads(plain(path).read_bytes())
        parts = (values, values.get("text_config"))
        found = [part.get("quantization_config") for part in parts if isinstance(part, dict)]
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path} ({error.strerror}): download it again"
        ) from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON object ({error}): download it again") from error
    if not any(found):
        return None
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    names = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items()]
    digest = hashlib.sha256("\n".join(names).encode())
    values = [_some_bytes(tensor) for tensor in tensors.values()]
    if values:
        digest.update(torch.cat(values).cpu().numpy().tobytes())  # one copy from the device
    return digest.hexdigest()[:_NUM_DIGITS]


def _some_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Up to 64 values as bytes, evenly spread from the first on."""
    flat = tensor.detach().reshape(-1)
    step = -(-len(flat) // _MOST_VALUES) or 1
    return flat[::step].contiguous().view(torch.uint8)
