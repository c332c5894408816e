"""A GGUF file as a plain checkpoint: Transformers' names, and each expert a weight of its own.

The names come from the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hotexperts.errors import CheckpointError, ConfigError
from hotexperts.gguf_header import parts_of, read_headers, value
from hotexperts.integrations.transformers.gguf_weights import (
    GgufFile,
    GgufTensor,
    tensors_of,
)

ATTRIBUTE = "hotexperts_gguf"  # of a configuration that came from a file
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Found(NamedTuple):
    """A model in one GGUF file, or in several.

    Attributes:
        parts: its files, in order.
        header: of the first.
        tensors: of all, by their names in the files.
    """

    parts: list[Path]
    header: Any
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """As the file names it."""
        return str(value(self.header, "general.architecture"))

    @classmethod
    def of(cls, path: Path) -> Found:
        """Read the headers.

        Raises:
            CheckpointError: missing, damaged, or of a type that is not read.
            ModuleNotFoundError: the `gguf` package is not installed.
        """
        parts, headers = parts_of(path), read_headers(path)
        tensors: dict[str, GgufTensor] = {}
        for header, part in zip(headers, parts, strict=True):
            tensors |= tensors_of(header, part)
        return cls(parts, headers[0], tensors)


def find_gguf(path: Any) -> Path | None:
    """The file that a path means; None where it means no GGUF.

    Args:
        path: of a file, of any part of a split one, or of a folder that has one model in GGUF and
            no safetensors; anything else means none.

    Raises:
        CheckpointError: no such file, or a folder with several such models.
    """
    if not isinstance(path, str | Path) or not str(path).strip():
        return None
    path = Path(path)
    if path.suffix == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file: give one that exists")
        return path
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return None
    first = sorted({parts_of(file)[0] for file in path.glob("*.gguf")})
    if len(first) > 1:
        names = ", ".join(file.name for file in first[:8])
        raise CheckpointError(f"{path}: holds {len(first)} models in GGUF ({names}): give one file")
    return first[0] if first else None


def gguf_of(config: Any) -> Path | None:
    """The file that a configuration came from."""
    found = getattr(config, ATTRIBUTE, None)
    return None if found is None else Path(found)


def from_where(
    path_or_id: str | Path, config: Any, auto_class: Any = None
) -> tuple[Any, dict[str, Any]]:
    """Whose `from_pretrained` loads a model, and its arguments that say where the weights are.

    A GGUF file is not Transformers' to read, which dequantises the whole of it: the hook in `load`
    gives it the tensors. Without a path the auto classes do not choose.

    Args:
        path_or_id: as for `load`.
        config: the model's.
        auto_class: as for `load`.

    Raises:
        ConfigError: another class for a GGUF file.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if gguf_of(config) is None:
        found = auto_class or AutoModelForCausalLM
        return found, {"pretrained_model_name_or_path": path_or_id}
    if auto_class not in (None, AutoModelForCausalLM):
        raise ConfigError(
            f"auto_class is {auto_class.__name__}: a GGUF file is for AutoModelForCausalLM: leave "
            "it out"
        )
    where: dict[str, Any] = {"pretrained_model_name_or_path": None, "state_dict": {}}
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], where


def open_gguf(model: Any, path: Path) -> tuple[list[Path], dict[str, GgufFile]]:
    """The files, and each weight under the name that a plain checkpoint has for it.

    Args:
        model: on the meta device.
        path: of the file, or of any part of a split one.

    Raises:
        CheckpointError: it has tensors that the model has no place for, or of another shape.
    """
    found = Found.of(path)
    weights: dict[str, GgufFile] = {}
    used = set()
    for key, name, parameter in _names(model, found.architecture):
        if name not in found.tensors:
            continue  # tied, or missing, of which the loader tells
        used.add(name)
        source = found.tensors[name]
        if parameter is None:  # of all experts
            for expert in range(source.shape[0]):
                one = key.format(expert)
                weights[one] = GgufFile(one, source.first(expert))
        else:
            weights[key] = GgufFile(key, source, _shape_in(path, source, parameter))
    left = sorted(set(found.tensors) - used)
    if left:
        raise CheckpointError(
            f"{path}: has {len(left)} tensors that {type(model).__name__} has no place for, "
            f"{left[0]} first: it is of another model, or of a form that is not read here: take "
            "the model's safetensors"
        )
    return found.parts, weights


def _names(model: Any, architecture: str) -> Iterator[tuple[str, str, Any]]:
    """Of each weight its key, its name in the file, and the parameter; None for experts."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    (number,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    known = get_tensor_name_map(number, model.config.num_hidden_layers)
    for key, parameter in model.state_dict().items():
        module, _, last = key.rpartition(".")
        if module.endswith(".experts"):
            for part in _EXPERTS.get(last, ()):
                name = known.get_name(f"{module}.{part}")
                yield f"{module}.{{}}.{part}.weight", f"{name}.weight", None
        else:
            yield key, f"{known.get_name(module)}.{last}", parameter


def _shape_in(path: Path, source: GgufTensor, parameter: Any) -> tuple[int, ...]:
    """The model's shape; the file may leave out dimensions of 1."""
    wanted = tuple(parameter.shape)
    if [size for size in wanted if size > 1] != [size for size in source.shape if size > 1]:
        raise CheckpointError(
            f"{path}: {source.name} has shape {list(source.shape)}, the model wants "
            f"{list(wanted)}: the file is of another model, or damaged"
        )
    return wanted
