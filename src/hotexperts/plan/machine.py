"""GPUs by name: how much they hold, how fast they read it, multiply, and copy from the host."""

from __future__ import annotations

from typing import NamedTuple

from hotexperts.errors import ConfigError

_REACHED = {"3x16": 12.0, "4x8": 12.5, "4x16": 25.0, "5x8": 25.0, "5x16": 52.0}  # GB/s of copies


class Machine(NamedTuple):
    """What a forecast must know of a GPU.

    Attributes:
        name: for people.
        vram_nbytes: its memory.
        memory_gb_s: of its memory, as the maker says.
        link_gb_s: of copies from the host, as they are reached.
        tflops: of its matrix units in 16 bits, adding up in 32, as the maker says.
    """

    name: str
    vram_nbytes: int
    memory_gb_s: float
    link_gb_s: float
    tflops: float


def _gpu(name: str, gib: int, memory_gb_s: float, link: str, tflops: float) -> Machine:
    return Machine(name, gib << 30, memory_gb_s, _REACHED[link], tflops)


GPUS = (
    _gpu("RTX 3060", 12, 360, "4x16", 25),
    _gpu("RTX 3090", 24, 936, "4x16", 71),
    _gpu("RTX 4060", 8, 272, "4x8", 30),
    _gpu("RTX 4060 Ti", 16, 288, "4x8", 44),
    _gpu("RTX 4070", 12, 504, "4x16", 58),
    _gpu("RTX 4080", 16, 717, "4x16", 97),
    _gpu("RTX 4090", 24, 1008, "4x16", 165),
    _gpu("RTX 5060 Ti", 16, 448, "5x8", 47),
    _gpu("RTX 5070 Ti", 16, 896, "5x16", 88),
    _gpu("RTX 5080", 16, 960, "5x16", 113),
    _gpu("RTX 5090", 32, 1792, "5x16", 209),
    _gpu("T4", 16, 320, "3x16", 65),
    _gpu("L4", 24, 300, "4x16", 121),
    _gpu("L40S", 48, 864, "4x16", 362),
    _gpu("A10", 24, 600, "4x16", 125),
    _gpu("A100", 40, 1555, "4x16", 312),
    _gpu("H100", 80, 3350, "5x16", 989),
    _gpu("H200", 141, 4800, "5x16", 989),
)


def by_name(name: str) -> Machine:
    """The GPU that people call so.

    Raises:
        ConfigError: an unknown one; the known are listed.
    """
    wanted = _plain(name)
    for machine in GPUS:
        if _plain(machine.name) == wanted:
            return machine
    known = ", ".join(machine.name for machine in GPUS)
    raise ConfigError(
        f"--gpu {name!r} is not known: give --vram, --link-gb-s, --memory-gb-s and --tflops "
        f"instead, or one of {known}"
    )


def _plain(name: str) -> str:
    kept = "".join(c for c in name.lower() if c.isalnum())
    return kept.removeprefix("nvidia").removeprefix("geforce").removeprefix("rtx")
