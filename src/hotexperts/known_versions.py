"""Versions of the engines that hotexperts is tested with, or whose sources were checked."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TRANSFORMERS = ("5.17", "5.24")
VLLM = ("0.26", "0.27", "0.32", "0.33")


def installed(*names: str) -> str | None:
    """The version of the first of these distributions that is there."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
