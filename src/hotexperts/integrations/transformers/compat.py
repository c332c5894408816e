"""Everything private of Transformers that the integration touches, checked before first use.

Known to work: see `KNOWN_VERSIONS`. The names are looked up here and nowhere else, so that a new
release fails in one place, at start, with its version in the message.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from hotexperts import known_versions
from hotexperts.errors import UnsupportedModelError

KNOWN_VERSIONS = known_versions.TRANSFORMERS
EXPERTS_FLAGS = ("is_transposed", "has_bias", "has_gate", "config")
KNOWN_DECORATOR_FLAGS = frozenset(
    {
        "experts_interface",
        "is_concatenated",
        "is_transposed",
        "has_bias",
        "has_gate",
        "has_post_expert_norm",
    }
)
KNOWN_PARAMETERS = frozenset(
    {"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}
)
# Where it is true, ids of num_experts and above are nobody's (5.17 takes them so without it).
SENTINEL_FLAG = "_is_expert_parallel"
# Stacked, but every token uses them: they stay with the model's other weights.
SHARED_EXPERTS = frozenset({"InklingSharedExperts"})
# Classes whose own loop adds up in another dtype than its input's.
SUMS_IN_WEIGHTS_DTYPE = frozenset({"NemotronHExperts"})
# Converter operations that dequantise, by the names of their classes.
FP8_OPERATION = "Fp8Dequantize"
MXFP4_OPERATION = "Mxfp4Dequantize"
COMPUTES_IN_FLOAT32 = frozenset({"OpenAIPrivacyFilterExperts"})
SUMS_IN_FLOAT32 = frozenset({"Inkling2Experts", "Inkling2LoopExperts"}) | COMPUTES_IN_FLOAT32


class TransformersNames(NamedTuple):
    """The names in use, found and checked.

    Attributes:
        experts_functions: registry of experts implementations by name.
        batched_mm: gathers the weights of every (token, expert) pair, then one batched product.
        grouped_mm: sorts pairs by expert, then one grouped product.
        base_model: `PreTrainedModel`.
        rename_source_key: checkpoint key to model key.
        natural_key: sort key under which checkpoint keys are visited.
        converter: class of weight converters.
        renaming: class of weight renamings.
        merge: converter operation that stacks per-expert tensors.
        concatenate: converter operation that joins gate and up.
    """

    experts_functions: Any
    batched_mm: Callable[..., torch.Tensor]
    grouped_mm: Callable[..., torch.Tensor]
    base_model: Any
    rename_source_key: Callable[..., tuple[str, str | None]]
    natural_key: Callable[[str], Any]
    converter: Any
    renaming: Any
    merge: Any
    concatenate: Any


@lru_cache(maxsize=1)
def names() -> TransformersNames:
    """Find and check the names.

    Raises:
        UnsupportedModelError: this Transformers lacks one of them; the message gives its version
            and the known ones.
    """
    import transformers

    try:
        from transformers import PreTrainedModel, core_model_loading
        from transformers.integrations import moe

        found = TransformersNames(
            moe.ALL_EXPERTS_FUNCTIONS,
            moe.batched_mm_experts_forward,
            moe.grouped_mm_experts_forward,
            PreTrainedModel,
            core_model_loading.rename_source_key,
            core_model_loading.dot_natural_key,
            core_model_loading.WeightConverter,
            core_model_loading.WeightRenaming,
            core_model_loading.MergeModulelist,
            core_model_loading.Concatenate,
        )
        _require_parameters(
            PreTrainedModel._load_pretrained_model,
            ["model", "state_dict", "checkpoint_files", "load_config"],
        )
        _require_parameters(
            core_model_loading.rename_source_key,
            ["source_key", "weight_renamings", "weight_converters", "base_model_prefix"],
        )
        _require_parameters(
            moe.batched_mm_experts_forward,
            ["self", "hidden_states", "top_k_index", "top_k_weights"],
        )
    except (ImportError, AttributeError) as error:
        raise UnsupportedModelError(
            f"Transformers {transformers.__version__} is not supported ({error}): install one of "
            f"{', '.join(KNOWN_VERSIONS)}"
        ) from error
    return found


def _require_parameters(function: Callable[..., Any], expected: list[str]) -> None:
    found = list(inspect.signature(function).parameters)
    if found[: len(expected)] != expected:
        raise AttributeError(f"{function.__qualname__} takes {found}, not {expected}")


def gguf_tables(model_type: str) -> tuple[Mapping[str, str | None], Mapping[str, Any]]:
    """Transformers' names for a GGUF file's keys, and values that no such file has.

    Raises:
        UnsupportedModelError: this Transformers has no such table.
    """
    import transformers

    try:
        from transformers.integrations import ggml

        keys = ggml.GGUF_CONFIG_MAPPING[model_type]
        defaults = ggml.GGUF_CONFIG_DEFAULTS_MAPPING.get(model_type, {})
    except (ImportError, AttributeError, KeyError) as error:
        raise UnsupportedModelError(
            f"Transformers {transformers.__version__} does not know {model_type} in GGUF "
            f"({error}): install one of {', '.join(KNOWN_VERSIONS)}"
        ) from error
    return keys, defaults


def only_stacks(operations: Sequence[Any]) -> bool:
    """Whether a conversion only stacks experts and joins gate and up: views do the same."""
    found = names()
    kinds = [(type(op), op.dim) for op in operations if hasattr(op, "dim")]
    if len(kinds) != len(operations):
        return False
    return kinds in ([(found.merge, 0)], [(found.merge, 0), (found.concatenate, 1)])


def original_forward(module: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """The experts class's own loop, behind the dispatching wrapper.

    A loop that computes in float32 gets its input so, and then does not round its result, which is
    only a part of the sum.
    """
    forward = type(module).forward.__wrapped__
    if type(module).__name__ not in COMPUTES_IN_FLOAT32:
        return forward
    return lambda self, hidden, *routing: forward(self, hidden.float(), *routing)


def eager_sum_dtype(module: Any, weights: torch.Tensor) -> torch.dtype | None:
    """The dtype in which an experts class's own loop adds up; None is that of its input."""
    name = type(module).__name__
    if name in SUMS_IN_FLOAT32:
        return torch.float32
    return weights.dtype if name in SUMS_IN_WEIGHTS_DTYPE else None


def is_decorated_experts(module: torch.nn.Module) -> bool:
    """Whether Transformers' experts decorator made this module's forward dispatch."""
    flags = all(hasattr(module, flag) for flag in EXPERTS_FLAGS)
    return flags and hasattr(type(module).forward, "__wrapped__")


def router_kinds(model: nn.Module) -> list[tuple[type[nn.Module], int]]:
    """Classes of routers and the index of their logits, from Transformers' own table."""
    kinds = []
    for module in model.modules():
        table = getattr(type(module), "_can_record_outputs", None) or {}
        listed = table.get("router_logits", [])
        for entry in listed if isinstance(listed, list) else [listed]:
            kind, index = getattr(entry, "target_class", None), getattr(entry, "index", None)
            if isinstance(kind, type) and isinstance(index, int) and (kind, index) not in kinds:
                kinds.append((kind, index))
    return kinds
