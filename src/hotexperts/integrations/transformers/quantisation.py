"""By which `quantization_config` a checkpoint's bytes are read: its files' headers do not say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from hotexperts.errors import CheckpointError
from hotexperts.plain_file import plain


def quantisation_digest(files: Sequence[Path]) -> str | None:
    """A digest of the `quantization_config` that says how a checkpoint's bytes are read.

    It is in `config.json` beside the files; a GGUF file says it itself, in its header.

    Args:
        files: the checkpoint's.

    Returns:
        64 hexadecimal digits, the same in whatever order its fields come; None without any.

    Raises:
        CheckpointError: the configuration cannot be read.
    """
    path = files[0].with_name("config.json")
    if files[0].suffix == ".gguf" or not path.exists():
        return None
    try:
        values = json.loads(plain(path).read_bytes())
        parts = (values, values.get("text_config"))
        found = [part.get("quantization_config") for part in parts if isinstance(part, dict)]
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path} ({error.strerror}): download it again"
        ) from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON object ({error}): download it again") from error
    if not any(found):
        return None
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
