"""Where the model inside the package lies: a small trained OLMoE, to try things on."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from hotexperts.errors import CheckpointError

FOLDER = Path(str(resources.files("hotexperts"))) / "demo_model"


def demo_model_path() -> Path:
    """The folder of the demonstration model, as `load` takes it.

    Raises:
        CheckpointError: this installation was made without it.
    """
    if not FOLDER.is_dir():
        raise CheckpointError(
            f"this installation has no demonstration model ({FOLDER} is missing): give a folder "
            "or a hub id"
        )
    return FOLDER
