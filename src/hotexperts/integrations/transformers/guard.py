"""What a cached model may not do: refused in words, before anything has changed.

Every module that holds experts, the model itself among them, gets a subclass of its own class
with the refusing methods. Closures on the instances would make cycles, and a deleted model would
keep its memory until the garbage collector comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from hotexperts.errors import UnsupportedOperationError
from hotexperts.integrations.transformers.experts import NAME

_REFUSED = {
    "save_pretrained": "would write a checkpoint without its experts: copy the original instead",
    "push_to_hub": "would upload a checkpoint without its experts: upload the original",
    "add_adapter": "and training need the experts as parameters: load without an expert cache",
    "load_adapter": "needs the experts as parameters: load without an expert cache",
    "load_state_dict": "would leave its experts as they are: load the other checkpoint instead",
    "__deepcopy__": "would share or lose its experts: load it a second time instead",
    "__reduce_ex__": "(or torch.save, copy) would lose its experts: load it again instead",
}
_SAID = {"__deepcopy__": "deepcopy", "__reduce_ex__": "pickle"}


def guard(model: nn.Module, experts: Sequence[nn.Module]) -> None:
    """Make the model, and each part of it that holds experts, refuse what would break it.

    Args:
        model: with caches attached.
        experts: its experts modules.
    """
    inside = set(experts)
    for module in list(model.modules()):
        if not inside.isdisjoint(module.modules()):
            module.__class__ = _guarded(module.__class__)
    model.requires_grad_(False)


@lru_cache(maxsize=256)
def _guarded(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass; it has the base's name and module, by which Transformers looks things up."""
    members: dict[str, Any] = {
        name: _refusing(name, reason)
        for name, reason in _REFUSED.items()
        if hasattr(base, name) or name == "__deepcopy__"
    }
    if hasattr(base, "set_experts_implementation"):
        members["set_experts_implementation"] = _set_experts_implementation
    if hasattr(base, "adjust_generation_fn"):
        members["adjust_generation_fn"] = _adjust_generation_fn
    members |= {
        "train": _train,
        "_apply": _apply,
        "_unguarded_class": base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (base,), members)


def refuse(name: str, reason: str) -> None:
    """Raise the error of all refusals."""
    raise UnsupportedOperationError(f"{name}() of a model with an expert cache {reason}")


def _refusing(name: str, reason: str) -> Callable[..., None]:
    def refused(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        refuse(_SAID.get(name, name), reason)

    return refused


def _set_experts_implementation(self: Any, experts_implementation: str | dict[str, str]) -> None:
    """Parts without experts (a vision tower) may change theirs: `generate` does that."""
    current = self.get_experts_implementation()
    wanted = experts_implementation
    if not isinstance(wanted, dict):
        wanted = dict.fromkeys(current, wanted)
    for part, name in current.items():
        if name == NAME != wanted.get(part, NAME):
            refuse(
                "set_experts_implementation",
                f"cannot change to {wanted[part]!r}, which needs the experts as parameters: give "
                "experts_algorithm to load() instead",
            )
    _base(self).set_experts_implementation(self, experts_implementation)


def _adjust_generation_fn(self: Any, *args: Any, **kwargs: Any) -> None:
    """`from_pretrained` ends with the folder's settings: what must not compile still must not."""
    disable_compile = self.generation_config.disable_compile
    _base(self).adjust_generation_fn(self, *args, **kwargs)
    if disable_compile:
        self.generation_config.disable_compile = True


def _train(self: nn.Module, mode: bool = True) -> nn.Module:
    if mode:
        refuse("train", "cannot work, its experts are not parameters: load without a cache")
    return _base(self).train(self, False)


def _apply(
    self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """`.to()`, `.cuda()`, `.half()` and their like: only where they change nothing."""
    for device, dtype in set(_places(self)):
        moved = fn(torch.empty(0, dtype=dtype, device=device))
        if (moved.device, moved.dtype) != (device, dtype):
            refuse(
                "to",
                f"cannot move it from {device}, {dtype} to {moved.device}, {moved.dtype}: its "
                "slots stay where they are; give device and dtype to load()",
            )
    return _base(self)._apply(self, fn, recurse)


def _base(module: nn.Module) -> Any:
    return type(module)._unguarded_class


def _places(module: nn.Module) -> Iterator[tuple[torch.device, torch.dtype]]:
    """Where the module's parameters and its experts' slots are, and of which dtypes."""
    for parameter in module.parameters():
        yield parameter.device, parameter.dtype
    for part in module.modules():
        cached = getattr(part, "_hotexperts", None)
        if cached is not None:
            for spec in cached.provider.store.layout.specs:
                yield cached.device, spec.dtype
