"""What a restart may keep: who was in which slot, and what the policy knew; never any weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotexperts.cache.streaming import StreamingProvider
from hotexperts.errors import CheckpointError, ConfigError
from hotexperts.plain_file import other_than_file, plain

FORMAT = 2  # 1 had no digest
_REMEDIES = {
    "policy": "take that one (--policy)",
    "mode": "take that one (--cache-mode)",
    "capacity": "take so many slots a layer (--expert-cache-size)",
}
_DELETE = "delete it, or name another file"


@dataclass(frozen=True, slots=True)
class About:
    """What a state depends on, beside the layers.

    Attributes:
        policy: its name.
        mode: who manages the caches: "host" or "device".
        capacity: slots a layer.
        model: a digest of the model's weights; None where nobody has made one.
    """

    policy: str
    mode: str
    capacity: int
    model: str | None = None


def save(path: str | Path, providers: Mapping[str, StreamingProvider], about: About) -> None:
    """Write the state of all layers to a file, whole or not at all; waits for the device.

    Args:
        path: replaced if it exists; a link stays, and what it leads to is replaced.
        providers: by the layers' names.
        about: what the state depends on.

    Raises:
        ConfigError: the file cannot be written.
    """
    layers = {
        name: {"shape": _shape(provider), "state": provider.state()}
        for name, provider in providers.items()
    }
    target = Path(os.path.realpath(path))
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        check_file(target)  # a device would be replaced, too
        content = {"format": FORMAT, "digest": digest(layers), **asdict(about), "layers": layers}
        unfinished.write_text(json.dumps(content))
        unfinished.replace(target)
    except OSError as error:
        raise ConfigError(
            f"cannot write the cache's state to {path} ({error.strerror}): make room, or name "
            "another file"
        ) from error
    finally:  # an interrupt, too, leaves nothing beside it
        with suppress(OSError):
            unfinished.unlink()


def load(path: str | Path, providers: Mapping[str, StreamingProvider], about: About) -> None:
    """Restore what `save` wrote: every layer or none.

    Args:
        path: the file.
        providers: by the layers' names.
        about: must be what it was.

    Raises:
        CheckpointError: the file is no such file, is damaged, is another version's, or does not
            say which model it is of.
        ConfigError: it is of another model, policy, mode or capacity.
    """
    content = _read(Path(path))
    for name, remedy in _REMEDIES.items():
        if content.get(name) != getattr(about, name):
            raise ConfigError(
                f"{path} was saved with {name} {content.get(name)}, and this cache has "
                f"{getattr(about, name)}: {remedy}, or name another file"
            )
    layers = content["layers"]
    if list(layers) != list(providers):
        raise ConfigError(
            f"{path} is of a model with {len(layers)} layers, the first of them "
            f"{next(iter(layers), 'none')}, and this one has {len(providers)}, the first "
            f"{next(iter(providers), 'none')}: use another file"
        )
    for name, provider in providers.items():
        if layers[name].get("shape") != _shape(provider):
            raise ConfigError(
                f"{path} is of a model whose {name} has {layers[name].get('shape')}, and here it "
                f"is {_shape(provider)}: use another file"
            )
    _check_model(path, content.get("model"), about.model)
    if content.get("digest") != digest(layers):
        raise CheckpointError(f"{path} is damaged (its digest is another): {_DELETE}")
    try:
        for name, provider in providers.items():
            provider.restore(layers[name]["state"])
    except BaseException as error:
        for provider in providers.values():
            provider.reset()
        if isinstance(error, CheckpointError | ConfigError | LookupError | TypeError | ValueError):
            raise CheckpointError(
                f"{path} cannot be restored ({error or type(error).__name__}): {_DELETE}"
            ) from error
        raise


def check_file(path: Path) -> None:
    """Refuse, before the long part, what holds no state and must not be replaced by one.

    Raises:
        ConfigError: a pipe, a device or a folder is there.
    """
    kind = other_than_file(path)
    if kind is not None:
        raise ConfigError(f"{path}: {kind} is there: name a file for the cache's state")


def _check_model(path: str | Path, saved: Any, here: str | None) -> None:
    """Layers of the same shapes do not make the same model; its weights tell."""
    if here is not None and saved is None:
        raise CheckpointError(
            f"{path} does not say which model it is of, for an earlier version wrote it: {_DELETE}"
        )
    if here is not None and saved != here:
        raise ConfigError(
            f"{path} is of another model with the same shapes (its weights have the digest "
            f"{saved!s:.40}, and here it is {here}): give that model, or name another file"
        )


def digest(layers: dict[str, Any]) -> str:
    """Of the layers' states: that each field may be true does not make them true of one cache."""
    return hashlib.sha256(json.dumps(layers, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(plain(path).read_text())
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path} ({error.strerror}): name a file that can be read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} holds no state of a cache ({error}): {_DELETE}") from error
    is_ours = isinstance(content, dict) and isinstance(content.get("layers"), dict)
    if not is_ours or not all(isinstance(v, dict) for v in content["layers"].values()):
        raise CheckpointError(f"{path} holds no state of a cache: {_DELETE}")
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')}, and this version reads {FORMAT}: {_DELETE}"
        )
    return content


def _shape(provider: StreamingProvider) -> str:
    store = provider.store
    tensors = ", ".join(
        f"{spec.name} {'x'.join(map(str, spec.shape))} {str(spec.dtype).removeprefix('torch.')}"
        for spec in store.layout.specs
    )
    return f"{store.num_experts} experts of {tensors}"
