"""Options as values: sizes as people write them, and the checked set that a cache is built from."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

from hotexperts.errors import ConfigError

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")
_MOST = 2**63 - 1  # bytes or slots: more is a slip, and Python may refuse to print it
_MOST_DIGITS = 40
AUTO: Literal["auto"] = "auto"
DEFAULT_KV_TOKENS = 4096
LOWEST_TEMPERATURE = 1e-4  # logits divided by less are too large for float32
DEFAULT_POLICY = "adv"
DEFAULT_RAM_POLICY = "lru"
_MOST_GIB = 2**20


@dataclass(frozen=True, slots=True)
class Bytes:
    """A GPU budget in bytes, as opposed to a number of slots."""

    num_bytes: int


CacheSize: TypeAlias = int | Bytes | Literal["auto"]
StoreKind: TypeAlias = Literal["ram", "file", "disk", "auto"]
STORE_KINDS: tuple[StoreKind, ...] = ("ram", "file", "disk", "auto")
CacheMode: TypeAlias = Literal["auto", "host", "device"]
CACHE_MODES: tuple[CacheMode, ...] = ("auto", "host", "device")
ExpertPacking: TypeAlias = Literal["auto", "none", "packed12"]
Prefetch: TypeAlias = Literal["off", "router", "lift"]
PREFETCHES: tuple[Prefetch, ...] = ("off", "router", "lift")
PACKINGS: tuple[ExpertPacking, ...] = ("auto", "none", "packed12")
DEFAULT_PACKING: ExpertPacking = AUTO
FAST_LINK_GB_S = 64.0  # from here on "auto" packs nothing: PCIe 5 with 16 lanes gives less
ExpertDtype: TypeAlias = Literal["none", "fp8", "int8", "int4"]
EXPERT_DTYPES: tuple[ExpertDtype, ...] = ("none", "fp8", "int8", "int4")


def parse_bytes(text: str) -> int:
    """Bytes from "6GiB", "512 MB", "1.5GB".

    Raises:
        ConfigError: no number, no unit or an unknown one, less than one byte or too many.
    """
    _check_length(text)
    match = _SIZE.fullmatch(text)
    known = ", ".join(_UNITS)
    if match is None:
        raise ConfigError(f"size {text!r} is not a number with a unit: write for example 6GiB")
    number, unit = match.groups()
    by_lower = {name.lower(): factor for name, factor in _UNITS.items()}
    if unit.lower() not in by_lower:
        raise ConfigError(f"size {text!r} has the unknown unit {unit!r}: use one of {known}")
    num_bytes = int(Fraction(number) * by_lower[unit.lower()])
    if num_bytes < 1:
        raise ConfigError(f"size {text!r} is less than a byte: give more")
    if num_bytes > _MOST:
        raise ConfigError(f"size {text!r} is more than any machine has: give less")
    return num_bytes


def gib_to_bytes(gib: float | None, option: str) -> int | None:
    """Bytes of a number of GiB; None stays None.

    Raises:
        ConfigError: no size, or more than any machine has; `option` is named.
    """
    if gib is None:
        return None
    if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 < gib <= _MOST_GIB:
        raise ConfigError(f"{option} is {gib!r}: give a number of GiB more than 0, for example 16")
    return max(1, int(gib * 2**30))


def parse_cache_size(value: int | str) -> CacheSize:
    """Slots a layer (32 or "32"), "auto", or a GPU budget ("6GiB").

    Raises:
        ConfigError: none of these, fewer than one slot or too many.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _no_cache_size(value)
    if isinstance(value, str) and value.strip() == AUTO:
        return AUTO
    if isinstance(value, str):
        _check_length(value)
        if _SIZE.fullmatch(value):
            return Bytes(parse_bytes(value))
        if re.fullmatch(r"\s*[-+]?\d+\s*", value) is None:
            raise _no_cache_size(value)
    num_slots = int(value)
    if num_slots > _MOST:
        raise ConfigError("expert_cache_size is a number beyond any model: give fewer slots")
    if num_slots < 1:
        raise ConfigError(
            f"expert_cache_size is {num_slots}: at least 1 slot a layer is needed: give 1 or more"
        )
    return num_slots


def _no_cache_size(value: object) -> ConfigError:
    return ConfigError(
        f"expert_cache_size is {value!r}: give a number of slots a layer, 'auto' or a size such as "
        "'6GiB'"
    )


def _check_length(text: str) -> None:
    if len(text) > _MOST_DIGITS:
        raise ConfigError(
            f"size {text[:20] + '...'!r} has {len(text)} characters: write for example 6GiB"
        )


def format_bytes(num_bytes: float) -> str:
    """Bytes for people, in binary units with three digits: "1.25 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.3g} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


def round_up_bytes(num_bytes: float) -> str:
    """A size that a user may give, `parse_bytes` reads, and is at least so many bytes."""
    factor = next((unit for unit in (2**30, 2**20, 2**10) if num_bytes >= 10 * unit), 1)
    name = next(name for name, size in _UNITS.items() if size == factor)
    return f"{math.ceil(num_bytes / factor)}{name}"


def round_up_gib(num_bytes: int) -> str:
    """A number of GiB with three digits that is at least so many bytes, for options in GiB."""
    gib = num_bytes / 2**30
    step = Fraction(10) ** (math.floor(math.log10(gib)) - 2)
    return f"{float(math.ceil(Fraction(num_bytes, 2**30) / step) * step):.3g}"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What a user may choose about a cache.

    Attributes:
        size: slots a layer, a GPU budget in bytes for the whole model, or "auto".
        policy: a registered name or "module:Class".
        store: "ram" copies every expert into host memory (page-locked on CUDA); "file" leaves
            them in the checkpoint, memory-mapped; "disk" reads them from a pack and keeps some in
            host memory; "auto" is "ram" where they fit, else "disk" where there is a pack, else
            "file".
        mode: "host" lets Python decide in every layer; "device" lets a kernel decide and copy;
            "auto" is the device where it can, else the host.
        check_host_memory: refuse before loading when the host seems to have too little.
        packing: "packed12" keeps bf16 experts in 12 bits a value, without loss, which kernels
            unpack; "auto" does where a GPU's kernels copy what is missed, over a link that is
            slower than they are.
        prefetch: "router" copies, while the link is idle, what the next layer's router makes of
            this layer's input, or where that does not work what "lift" does: what has followed
            this layer's experts so far, as counted.
        ram_nbytes: host memory for experts that are on disk; None is half of what is free.
        ram_policy: which of them leaves it: a registered name or "module:Class".
        pack: the pack's file; None is where `hotexperts pack` puts it.
        expert_dtype: "fp8", "int8" or "int4" quantises experts as they are loaded, which is lossy;
            slots hold the model's dtype all the same.
    """

    size: CacheSize = AUTO
    policy: str = DEFAULT_POLICY
    store: StoreKind = "ram"
    mode: CacheMode = AUTO
    check_host_memory: bool = True
    packing: ExpertPacking = DEFAULT_PACKING
    prefetch: Prefetch = "off"
    ram_nbytes: int | None = None
    ram_policy: str = DEFAULT_RAM_POLICY
    pack: str | None = None
    expert_dtype: ExpertDtype = "none"

    def __post_init__(self) -> None:
        if self.store not in STORE_KINDS:
            raise ConfigError(
                f"expert_store is {self.store!r}: use 'ram' or 'file', 'disk' or 'auto'"
            )
        self._check_disk()
        if self.mode not in CACHE_MODES:
            raise ConfigError(f"cache_mode is {self.mode!r}: use 'auto', 'host' or 'device'")
        if self.mode == "device" and not self.has_page_locked_store:
            raise ConfigError(
                "cache_mode 'device' reads experts from page-locked memory: use expert_store 'ram'"
            )
        if self.prefetch not in PREFETCHES:
            raise ConfigError(f"prefetch is {self.prefetch!r}: use 'off', 'router' or 'lift'")
        if self.packing not in PACKINGS:
            raise ConfigError(
                f"expert_packing is {self.packing!r}: use 'auto', 'none' or 'packed12'"
            )
        if self.packing == "packed12" and (self.mode == "host" or not self.has_page_locked_store):
            is_store = not self.has_page_locked_store
            of_store = f"expert_store {self.store!r}: use expert_store 'ram'"
            given = of_store if is_store else "cache_mode 'host': use cache_mode 'auto'"
            raise ConfigError(
                "expert_packing 'packed12' is unpacked by kernels, from page-locked memory: it "
                f"does not work with {given}, or expert_packing 'auto'"
            )
        self._check_expert_dtype()

    def _check_expert_dtype(self) -> None:
        if self.expert_dtype not in EXPERT_DTYPES:
            raise ConfigError(
                f"expert_dtype is {self.expert_dtype!r}: use 'none', 'fp8', 'int8' or 'int4'"
            )
        if self.expert_dtype != "none" and not self.has_page_locked_store:
            raise ConfigError(
                f"expert_dtype {self.expert_dtype!r} quantises experts while they are copied into "
                f"memory, which expert_store {self.store!r} does not: use expert_store 'ram'"
            )
        if self.expert_dtype != "none" and self.packing == "packed12":
            raise ConfigError(
                f"expert_dtype {self.expert_dtype!r} and expert_packing 'packed12' are two forms "
                "of the same experts: leave one of the two out"
            )

    @property
    def has_page_locked_store(self) -> bool:
        """Whether kernels can read experts where they are; of "auto", whether they may."""
        return self.store in ("ram", AUTO)

    def _check_disk(self) -> None:
        if self.store in ("disk", AUTO):
            return
        for option, is_given in (
            ("expert_ram_gib", self.ram_nbytes is not None),
            ("expert_ram_policy", self.ram_policy != DEFAULT_RAM_POLICY),
            ("expert_pack", self.pack is not None),
        ):
            if is_given:
                raise ConfigError(
                    f"{option} is for experts on disk, and expert_store is {self.store!r}: use "
                    "expert_store 'disk' or 'auto', or leave it out"
                )
