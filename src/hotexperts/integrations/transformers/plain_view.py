"""A checkpoint of packed weights, or in GGUF, as a plain one: each is read as its numbers.

So Transformers finds a plain checkpoint, and whatever a model's conversion does with names and
shapes stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from hotexperts.cache.safetensors_file import SafetensorsFile, TensorEntry
from hotexperts.errors import CheckpointError
from hotexperts.integrations.transformers.gguf_checkpoint import gguf_of, open_gguf
from hotexperts.integrations.transformers.packed_weights import PackedWeight
from hotexperts.integrations.transformers.schemes import NAMES, Scheme

ATTRIBUTE = "hotexperts_quantisation"  # of a configuration whose quantization_config was taken


class TensorFile(Protocol):
    """What tensors are read from."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Tensor name to its place; the dtype of what is no tensor of torch's is a text."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """A view of one tensor, or a tensor of its own."""
        ...

    def release(self, name: str) -> None:
        """Hand the pages of one tensor back to the system."""
        ...


class PackedFile:
    """A packed weight, as if it were in a file alone.

    Attributes:
        path: of the file that has its codes.
        entries: the weight, whose dtype is none of torch's.
        weight: what it is.
    """

    def __init__(self, weight: PackedWeight) -> None:
        method = weight.scheme.method
        self.path = weight.files[NAMES[method]["codes"]].path
        self.weight = weight
        entry = TensorEntry(f"{method} int{weight.kind.bits}", weight.shape, 0, 0)
        self.entries: Mapping[str, TensorEntry] = {f"{weight.name}.weight": entry}

    def tensor(self, name: str) -> torch.Tensor:
        """Its numbers, float32."""
        assert name in self.entries
        return self.weight.dequantised()

    def release(self, name: str) -> None:
        """Hand its pages back."""
        assert name in self.entries
        self.weight.release()


def is_read_here(config: Any) -> bool:
    """Whether Transformers gets what is read here in place of the checkpoint's files."""
    return getattr(config, ATTRIBUTE, None) is not None or gguf_of(config) is not None


def take_quantisation(config: Any, found: Any, where: object) -> None:
    """Let Transformers take a configuration for that of a plain checkpoint.

    Args:
        config: Transformers'.
        found: its `quantization_config`, or that of its text part.
        where: the checkpoint, for messages.

    Raises:
        CheckpointError: see `Scheme.of`.
    """
    Scheme.of(where, found)
    for part in (config, config.get_text_config(decoder=True)):  # a text model gets that alone
        setattr(part, ATTRIBUTE, found)
        if hasattr(part, "quantization_config"):
            del part.quantization_config


class OpenFiles(NamedTuple):
    """A checkpoint's files.

    Attributes:
        paths: of them.
        file_of: the file of each tensor.
        state_dict: what Transformers gets in place of files that it is not to read; else None.
    """

    paths: list[Path]
    file_of: Mapping[str, TensorFile]
    state_dict: dict[str, LazyTensor] | None


def open_files(model: Any, files: Sequence[str | Path] | None) -> OpenFiles:
    """Open a checkpoint's files.

    Args:
        model: on the meta device.
        files: safetensors files; a key in two of them is read from the later one. Where the
            configuration came from a GGUF file there are none.

    Raises:
        CheckpointError: a file is missing or corrupt, or packed weights are not as they should be.
    """
    config, gguf = model.config, gguf_of(model.config)
    if gguf is not None:
        parts, weights = open_gguf(model, gguf)
        return OpenFiles(parts, weights, _lazy(weights))
    paths = [Path(file) for file in files or ()]
    file_of: dict[str, TensorFile] = {}
    for file in map(SafetensorsFile, paths):
        file_of |= dict.fromkeys(file.entries, file)
    if not is_read_here(config):
        return OpenFiles(paths, file_of, None)
    where = paths[0].parent
    plain = _plain(file_of, Scheme.of(where, getattr(config, ATTRIBUTE)), where)
    return OpenFiles(paths, plain, _lazy(plain))


def _lazy(file_of: Mapping[str, TensorFile]) -> dict[str, LazyTensor]:
    return {name: LazyTensor(file, name) for name, file in file_of.items()}


def _plain(
    file_of: Mapping[str, TensorFile], scheme: Scheme, where: Path
) -> Mapping[str, TensorFile]:
    """Of the tensors of a packed checkpoint, those of the plain one that it stands for."""
    packed: dict[str, dict[str, TensorFile]] = defaultdict(dict)
    names = set(NAMES[scheme.method].values())
    certain = names - {"scales"}  # which may be a parameter of a model's own
    modules = {module for key in file_of for module, _, last in [_parts(key)] if last in certain}
    plain: dict[str, TensorFile] = {}
    for key, file in file_of.items():
        module, _, suffix = _parts(key)
        if module in modules and suffix in names:
            packed[module][suffix] = file
        else:
            plain[key] = file
    _check_packed(packed, plain, scheme, where)
    for module, parts in packed.items():
        plain[f"{module}.weight"] = PackedFile(PackedWeight(module, scheme, parts))
    return plain


def check_left_out(key: str, file_of: Mapping[str, TensorFile]) -> None:
    """Refuse a packed weight's bias that the model has no place for, unless it does nothing.

    Older writers of GPTQ add zeros to every weight.

    Raises:
        CheckpointError: it has values.
    """
    module, _, suffix = _parts(key)
    if suffix != "bias" or not isinstance(file_of.get(f"{module}.weight"), PackedFile):
        return
    if bool(file_of[key].tensor(key).any()):
        raise CheckpointError(
            f"{key} has values, and the model has no such parameter: the checkpoint is of another "
            "model"
        )


def _parts(key: str) -> tuple[str, str, str]:
    return key.rpartition(".")


def _check_packed(
    packed: Mapping[str, Any], plain: Mapping[str, Any], scheme: Scheme, where: Path
) -> None:
    twice = next((module for module in packed if f"{module}.weight" in plain), None)
    if twice is not None:
        raise CheckpointError(
            f"{twice}.weight is in the checkpoint plain and packed: it is corrupt; download it "
            "again"
        )
    if not packed:
        raise CheckpointError(
            f"{where}: quantization_config says {scheme.method}, and no tensor is "
            f"named ...{NAMES[scheme.method]['codes']}: the files are of another checkpoint"
        )


class LazyTensor:
    """A tensor that is read when Transformers slices it, as it does with those of files."""

    def __init__(self, file: TensorFile, name: str) -> None:
        self._file = file
        self._name = name

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self._file.tensor(self._name)[index]
        is_made = isinstance(self._file.entries[self._name].dtype, str)
        return found if is_made else found.clone()  # the map is read-only
