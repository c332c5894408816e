"""Options of the experts, which every command that loads a model takes, as one value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Annotated, Any, cast

import typer

from hotexperts.cli.options import Dtype, ExpertPack
from hotexperts.config import (
    AUTO,
    CACHE_MODES,
    DEFAULT_PACKING,
    DEFAULT_RAM_POLICY,
    EXPERT_DTYPES,
    PACKINGS,
    PREFETCHES,
    CacheConfig,
    CacheMode,
    ExpertDtype,
    ExpertPacking,
    Prefetch,
    gib_to_bytes,
)
from hotexperts.errors import ConfigError
from hotexperts.policy import DEFAULT_POLICY, POLICIES


class Store(str, Enum):
    """Where the experts live; the names of `load(expert_store=...)`."""

    RAM = "ram"
    FILE = "file"
    DISK = "disk"
    AUTO = "auto"


ExpertStore = Annotated[
    Store,
    typer.Option(
        help="Copy experts into host memory (ram), leave them in the checkpoint (file), read them "
        "from a pack and keep some in memory (disk), or what the free memory allows (auto)."
    ),
]
ExpertRamGib = Annotated[
    float | None,
    typer.Option(
        metavar="G",
        help="Host memory for experts that are on disk, in GiB.",
        show_default="half of what is free",
    ),
]
ExpertRamPolicy = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Which of the experts on disk leaves host memory; as --policy."
    ),
]
ExpertPackingName = Annotated[
    str,
    typer.Option(
        "--expert-packing",
        help="Keep bf16 experts in 12 bits a value in host memory, without loss (packed12), as "
        "they are (none), or packed where kernels on the GPU copy them (auto).",
        metavar="|".join(PACKINGS),
    ),
]
ExpertDtypeName = Annotated[
    str,
    typer.Option(
        "--expert-dtype",
        help="Quantise experts as they are loaded into host memory, which changes them a little; "
        "slots hold the model's dtype.",
        metavar="|".join(EXPERT_DTYPES),
    ),
]
CacheModeName = Annotated[
    str,
    typer.Option(
        "--cache-mode",
        help="Let Python decide which experts to copy (host), a kernel on the GPU (device), or the "
        "kernel where it can (auto).",
        metavar="|".join(CACHE_MODES),
    ),
]
PrefetchName = Annotated[
    str,
    typer.Option(
        "--prefetch",
        help="While the link is idle, copy what the next layer's router would choose now (router), "
        "or what has followed this layer's experts so far (lift); needs kernels that manage the "
        "cache.",
        metavar="|".join(PREFETCHES),
    ),
]


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """Where the experts live, in which form, and who copies them, as the options say.

    Each attribute is the option of its name. A command has the group in its signature, without what
    it does not take: see `groups.expanded`.
    """

    expert_store: ExpertStore = Store.RAM
    expert_ram_gib: ExpertRamGib = None
    expert_ram_policy: ExpertRamPolicy = DEFAULT_RAM_POLICY
    expert_pack: ExpertPack = None
    expert_packing: ExpertPackingName = DEFAULT_PACKING
    expert_dtype: ExpertDtypeName = "none"
    cache_mode: CacheModeName = AUTO
    prefetch: PrefetchName = "off"

    def for_load(
        self,
        *,
        device: str | None,
        dtype: Dtype,
        no_host_memory_check: bool,
        policy: str = DEFAULT_POLICY,
    ) -> dict[str, Any]:
        """What `load` takes of these and of the command's other options, checked without torch.

        Args:
            device: of `--device`.
            dtype: of `--dtype`.
            no_host_memory_check: of `--no-host-memory-check`.
            policy: of `--policy`.

        Raises:
            UnknownNameError: a policy is none.
            ConfigError: a mode, a packing, a dtype or a prefetch that is none, or that does not go
                with the others.
        """
        POLICIES.load(policy)
        POLICIES.load(self.expert_ram_policy)
        CacheConfig(
            store=self.expert_store.value,
            mode=cast(CacheMode, self.cache_mode),
            packing=cast(ExpertPacking, self.expert_packing),
            ram_nbytes=gib_to_bytes(self.expert_ram_gib, "--expert-ram-gib"),
            ram_policy=self.expert_ram_policy,
            pack=None if self.expert_pack is None else str(self.expert_pack),
            expert_dtype=cast(ExpertDtype, self.expert_dtype),
            prefetch=cast(Prefetch, self.prefetch),
        )
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "expert_store": self.expert_store.value,
            "device": device,
            "dtype": dtype.value,
            "policy": policy,
            "check_host_memory": not no_host_memory_check,
        }

    def check_fixed_store(self) -> None:
        """Refuse to compare or measure what may be another thing tomorrow.

        Raises:
            ConfigError: where the experts live depends on the memory that is free.
        """
        if self.expert_store is Store.AUTO:
            raise ConfigError(
                "--expert-store auto depends on the memory that is free now: give ram, file or disk"
            )


EXPERTS = ExpertOptions()  # what a command has where nothing is said
