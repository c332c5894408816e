"""What a checkpoint's `quantization_config` says of int4 and int8 weights, read and checked.

Formats: GPTQ as GPTQModel and AutoGPTQ write it, AWQ as AutoAWQ's GEMM version, and
compressed-tensors' `pack-quantized`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hotexperts.errors import CheckpointError

GPTQ, AWQ, COMPRESSED = METHODS = ("gptq", "awq", "compressed-tensors")
WHOLE_ROW = 0  # as the size of a group
# What a method calls the tensors of a weight, after the module's name, and which have to be there.
NAMES: dict[str, Mapping[str, str]] = {
    GPTQ: {"codes": "qweight", "scales": "scales", "zeros": "qzeros", "order": "g_idx"},
    AWQ: {"codes": "qweight", "scales": "scales", "zeros": "qzeros"},
    COMPRESSED: {
        "codes": "weight_packed",
        "scales": "weight_scale",
        "zeros": "weight_zero_point",
        "order": "weight_g_idx",
        "shape": "weight_shape",
    },
}
NEEDED = {
    GPTQ: ("codes", "scales", "zeros"),
    AWQ: ("codes", "scales", "zeros"),
    COMPRESSED: ("codes", "scales", "shape"),
}


class Kind(NamedTuple):
    """How weights are quantised.

    Attributes:
        bits: of a code.
        group_size: inputs that share a scale; WHOLE_ROW is all of them.
        has_order: groups are not of inputs side by side, and a tensor says each input's.
    """

    bits: int
    group_size: int
    has_order: bool = False

    def num_groups(self, num_inputs: int) -> int:
        """Scales of one output; the last one may be for fewer inputs."""
        return -(-num_inputs // self.group_size) if self.group_size else 1


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint's packed weights are to be read.

    Attributes:
        method: of METHODS.
        kinds: of its weights; which of them a weight is, its tensors' shapes say.
        zero_shift: what is added to a stored zero point.
    """

    method: str
    kinds: tuple[Kind, ...]
    zero_shift: int = 0

    @classmethod
    def of(cls, where: object, values: Mapping[str, Any]) -> Scheme:
        """What the configuration says.

        Args:
            where: the checkpoint, for messages.
            values: its `quantization_config`, of one of METHODS.

        Raises:
            CheckpointError: it is not sound, or asks for what is not read here.
        """
        fields = _Fields(f"{where}: quantization_config", values)
        return _READERS[values["quant_method"]](fields)


class _Fields(NamedTuple):
    """Values of a configuration, and how to say where they are."""

    where: str
    values: Mapping[str, Any]

    def require(self, name: str, wanted: tuple[Any, ...], default: Any = None) -> Any:
        """A value, or what stands for none of them."""
        value = self.values.get(name)
        value = default if value is None else value
        if value not in wanted or type(value) is not type(wanted[wanted.index(value)]):
            raise self.wrong(name, f"of {', '.join(map(repr, wanted))}")
        return value

    def group_size(self, name: str) -> int:
        """Of inputs that share a scale."""
        value = self.values.get(name)
        if type(value) is not int or not (value == -1 or value > 0):
            raise self.wrong(name, "a count, or -1")
        return WHOLE_ROW if value == -1 else value

    def nested(self, name: str) -> _Fields:
        """A mapping among the values."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return _Fields(f"{self.where}: {name}", value)

    def refuse(self, name: str, why: str) -> None:
        """Stop where there is such a value."""
        if self.values.get(name):
            raise CheckpointError(f"{self.where}: {name} is given, {why}: {_REMEDY}")

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        value = self.values.get(name)
        return CheckpointError(f"{self.where}: {name} is {value!r:.60}, not {wanted}: {_REMEDY}")


_VERSIONS = ("version", "checkpoint_format", "format")  # writers have different names for it
_REMEDY = "take another checkpoint of the model, or vLLM"


def _gptq(fields: _Fields) -> Scheme:
    """Version 1 keeps zero points less one; the order of inputs is each weight's own."""
    bits = fields.require("bits", (4, 8))
    versions = {fields.require(name, (GPTQ, "gptq_v2"), GPTQ) for name in _VERSIONS[1:]}
    fields.require("pack_dtype", ("int32",), "int32")
    fields.refuse("is_marlin_format", "which is a kernel's own order")
    if fields.values.get("dynamic"):
        modules = fields.nested("dynamic").values
        if not all(name.startswith("-:") for name in modules):
            raise fields.wrong("dynamic", "only of modules that are left out ('-:...')")
    has_order = fields.require("desc_act", (False, True), False)
    kind = Kind(bits, fields.group_size("group_size"), has_order)
    return Scheme(GPTQ, (kind,), 1 if versions == {GPTQ} else 0)


def _awq(fields: _Fields) -> Scheme:
    bits = "w_bit" if "w_bit" in fields.values else "bits"
    size = "q_group_size" if "q_group_size" in fields.values else "group_size"
    fields.require(bits, (4,))
    for name in _VERSIONS:
        fields.require(name, ("gemm", "GEMM"), "gemm")
    if fields.values.get("backend") == "llm-awq":
        raise fields.wrong("backend", "'autoawq'")
    return Scheme(AWQ, (Kind(4, fields.group_size(size)),))


def _compressed(fields: _Fields) -> Scheme:
    if fields.values.get("sparsity_config"):
        fields.nested("sparsity_config").require("format", ("dense",), "dense")
    fields.refuse("transform_config", "and no transform is applied here")
    groups = fields.nested("config_groups")
    if not groups.values:
        raise fields.wrong("config_groups", "one group or more")
    kinds = {_compressed_kind(fields, groups.nested(name)) for name in groups.values}
    return Scheme(COMPRESSED, tuple(sorted(kinds)))


def _compressed_kind(fields: _Fields, group: _Fields) -> Kind:
    where = group if group.values.get("format") is not None else fields
    where.require("format", ("pack-quantized",))
    group.refuse("input_activations", "and inputs are not quantised here")
    group.refuse("output_activations", "and outputs are not quantised here")
    weights = group.nested("weights")
    bits = weights.require("num_bits", (4, 8))
    weights.require("type", ("int",), "int")
    default = "channel" if weights.values.get("group_size") in (None, -1) else "group"
    if weights.require("strategy", ("group", "channel"), default) == "channel":
        return Kind(bits, WHOLE_ROW)
    orders = (None, "group", "weight", "static", "dynamic")
    has_order = weights.require("actorder", orders) in ("group", "dynamic")
    return Kind(bits, weights.group_size("group_size"), has_order)


_READERS: dict[str, Callable[[_Fields], Scheme]] = {
    GPTQ: _gptq,
    AWQ: _awq,
    COMPRESSED: _compressed,
}
