"""The tokenizer of a checkpoint, or a clear word about what it lacks."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from hotexperts.cli.console import quiet_libraries
from hotexperts.errors import CheckpointError
from hotexperts.gguf_header import parts_of
from hotexperts.integrations.transformers.gguf_checkpoint import find_gguf


def load_tokenizer(path: str, *, trust_remote_code: bool) -> Any:
    """The tokenizer of a checkpoint.

    Raises:
        CheckpointError: it has none, or one that Transformers cannot read.
    """
    try:
        with quiet_libraries():
            found = AutoTokenizer.from_pretrained(
                **_where_from(path), trust_remote_code=trust_remote_code
            )
    except Exception as error:  # corrupt files raise almost anything, from several libraries
        raise CheckpointError(_no_tokenizer(path, str(error).strip().split("\n")[0])) from error
    if len(found) <= len(found.all_special_ids):  # what Transformers makes of missing files
        raise CheckpointError(_no_tokenizer(path, "it has no vocabulary"))
    return found


def _where_from(path: str) -> dict[str, Any]:
    gguf = find_gguf(path)
    if gguf is None:
        return {"pretrained_model_name_or_path": path}
    first = parts_of(gguf)[0]  # of a split file, which alone has the words
    return {"pretrained_model_name_or_path": str(first.parent), "gguf_file": first.name}


def _no_tokenizer(path: str, reason: str) -> str:
    if find_gguf(path) is not None:
        return (
            f"{path}: Transformers cannot read its tokenizer ({reason}): take another file of the "
            "model, or its safetensors"
        )
    shown = "" if reason.endswith(":") else f" ({reason})"  # a list follows that no line holds
    return (
        f"{path}: no tokenizer could be loaded{shown}: its files (tokenizer.json, "
        "tokenizer_config.json) must be with the weights: download them too"
    )
