"""The checkpoint tensors of one experts parameter, and which of them belongs to which expert."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hotexperts.errors import CheckpointError, UnsupportedModelError
from hotexperts.integrations.transformers.modules import ExpertsModule
from hotexperts.integrations.transformers.plain_view import TensorFile

_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)

_AGAIN = "download it again, or give the folder of this model"


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of a checkpoint.

    Attributes:
        file: where it is.
        key: its name there.
        expert: the number in the place of the source pattern's wildcard; None where the tensor
            holds all experts.
    """

    file: TensorFile
    key: str
    expert: int | None

    @property
    def dtype(self) -> torch.dtype | str:
        """Its dtype in the file; one that torch does not have is a text."""
        return self.file.entries[self.key].dtype

    def tensor(self) -> torch.Tensor:
        """A view of the file, or the numbers of a packed one."""
        return self.file.tensor(self.key)


@dataclass
class ParameterSources:
    """Checkpoint tensors of one experts parameter, by source pattern."""

    converter: Any = None
    by_pattern: dict[str, list[Source]] = field(default_factory=dict)

    def check(self, target: str, num_experts: int) -> None:
        """Sort the tensors of single experts by expert.

        Raises:
            CheckpointError: an expert has no tensor, or two, or the model has no such expert.
            UnsupportedModelError: a tensor holds several experts, but not all.
        """
        for pattern, sources in self.by_pattern.items():
            numbers = [source.expert for source in sources if source.expert is not None]
            if len(numbers) == len(sources):
                _check_numbers(f"{target} ({pattern})", numbers, num_experts)
                sources.sort(key=lambda source: source.expert or 0)
                _check_shapes(f"{target} ({pattern})", sources)
            else:
                _check_stacked(f"{target} ({pattern})", sources, num_experts)

    def check_scaled(self) -> None:
        """Codes are no numbers without their scales.

        Raises:
            CheckpointError: a tensor is float8, and no scale came with any.
        """
        if any("scale" in pattern for pattern in self.by_pattern):
            return
        for source in (sources[0] for sources in self.by_pattern.values()):
            if source.dtype in _CODES:
                raise CheckpointError(
                    f"{source.key} is {str(source.dtype).removeprefix('torch.')}, and no scale "
                    "came with it: tensors ...weight_scale_inv are missing, or config.json has "
                    "lost its quantization_config; download the checkpoint again"
                )

    def unreadable(self, target: str, expert: int, error: Exception) -> CheckpointError:
        """What to raise where tensors of this parameter cannot be converted."""
        shapes = ", ".join(
            f"{found[0].key} {list(found[0].file.entries[found[0].key].shape)}"
            for found in self.by_pattern.values()
        )
        return CheckpointError(
            f"{target}, expert {expert}, cannot be made from {shapes}: "
            f"{type(error).__name__}: {error}; the checkpoint is incomplete, or of another model: "
            "download it again"
        )

    def release(self, expert: int, num_experts: int) -> None:
        """Hand back the pages of one expert; of a stack, with the last one."""
        for sources in self.by_pattern.values():
            if sources[0].expert is not None:
                sources[expert].file.release(sources[expert].key)
            elif expert == num_experts - 1:
                sources[0].file.release(sources[0].key)


def expert_number(key: str, pattern: str) -> int | None:
    """What stands in the place of a source pattern's wildcard: "experts.*.w1" and so on."""
    match = (
        re.search(pattern.replace("*.", r"(?P<expert>.*)\.", 1), key) if "*." in pattern else None
    )
    number = match["expert"] if match else ""
    return int(number) if number.isdecimal() else None


def view(sources: list[Source], expert: int) -> torch.Tensor:
    """One expert's tensor with a leading dimension of 1."""
    if sources[0].expert is not None:
        return sources[expert].tensor().unsqueeze(0)
    return sources[0].tensor()[expert : expert + 1]


def place(sources: list[Source], expert: int, num_experts: int) -> tuple[TensorFile, int, int]:
    """Where one expert's bytes of a tensor lie: the file, and their begin and end in it."""
    source = sources[expert if sources[0].expert is not None else 0]
    _, _, begin, end = source.file.entries[source.key]
    if source.expert is not None:
        return source.file, begin, end
    nbytes = (end - begin) // num_experts
    return source.file, begin + expert * nbytes, begin + (expert + 1) * nbytes


def one_expert(sources: list[Source], expert: int) -> list[torch.Tensor]:
    """What a converter collects for a layer of one expert: a list with its tensor.

    A copy, because a converter may write to it and the file is mapped read-only.
    """
    tensor = view(sources, expert).clone()
    return [tensor[0] if sources[0].expert is not None else tensor]


def _check_numbers(what: str, numbers: list[int], num_experts: int) -> None:
    missing = sorted(set(range(num_experts)) - set(numbers))
    beyond = sorted(set(numbers) - set(range(num_experts)))
    if missing:
        raise CheckpointError(
            f"{what}: the checkpoint has no tensor of expert {missing[0]}, and lacks "
            f"{len(missing)} of {num_experts} experts: {_AGAIN}"
        )
    if beyond or len(numbers) != num_experts:
        twice = next((n for n in numbers if numbers.count(n) > 1), None)
        fault = f"expert {beyond[0]}" if beyond else f"two tensors of expert {twice}"
        raise CheckpointError(
            f"{what}: the checkpoint has {fault}, the model has {num_experts} experts: {_AGAIN}"
        )


def _check_shapes(what: str, sources: list[Source]) -> None:
    shapes = [source.file.entries[source.key].shape for source in sources]
    other = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is not None:
        raise CheckpointError(
            f"{what}: expert 0 has shape {list(shapes[0])}, expert {other} {list(shapes[other])} "
            f"in the checkpoint: {_AGAIN}"
        )


def _check_stacked(what: str, sources: list[Source], num_experts: int) -> None:
    shape = sources[0].file.entries[sources[0].key].shape
    if len(sources) != 1 or shape[:1] != (num_experts,):
        raise UnsupportedModelError(
            f"{what} is stored in {len(sources)} tensors, the first of shape {list(shape)}, for "
            f"{num_experts} experts, so that one cannot be read alone: load this model without an "
            "expert cache"
        )


class ModelOfOneExpert:
    """What a converter sees for the model: experts parameters of shape `[1, ...]`.

    Converters ask for the shape or dtype of the parameter that they make. The rest is the model's,
    which is not kept alive.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._layers: dict[str, _LayerOfOneExpert] = {}

    def add(self, experts: ExpertsModule) -> None:
        """Make the parameters of one layer known."""
        self._layers[experts.name] = _LayerOfOneExpert(
            {
                spec.name: nn.Parameter(
                    torch.empty(1, *spec.shape, dtype=spec.dtype, device="meta"),
                    requires_grad=False,
                )
                for spec in experts.layout.specs
            }
        )

    def get_submodule(self, name: str) -> Any:
        """The model's module, or one with the parameters of a single expert."""
        return self._layers.get(name) or self.__getattr__("get_submodule")(name)

    def get_parameter(self, name: str) -> torch.Tensor:
        """The model's parameter, or that of a single expert."""
        layer, _, parameter = name.rpartition(".")
        if layer in self._layers:
            return self._layers[layer].__getattr__(parameter)
        return self.__getattr__("get_parameter")(name)

    get_parameter_or_buffer = get_parameter

    def __getattr__(self, name: str) -> Any:
        model = self._model()
        if model is None:
            raise AttributeError(f"{name}: the model is gone")
        return getattr(model, name)


class _LayerOfOneExpert:
    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters

    def __getattr__(self, name: str) -> torch.Tensor:
        if name not in self._parameters:
            raise AttributeError(name)
        return self._parameters[name]
