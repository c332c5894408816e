"""Transformers' `from_pretrained`, with our hook in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hotexperts.errors import CheckpointError, UnsupportedModelError
from hotexperts.integrations.transformers import experts
from hotexperts.integrations.transformers import load as loading
from hotexperts.integrations.transformers.gguf_checkpoint import from_where
from hotexperts.integrations.transformers.repository import not_of_the_class, why_unreadable


def from_pretrained_by_us(
    path_or_id: str | Path,
    options: loading.LoadOptions,
    auto_class: Any,
    device: torch.device,
    rest: dict[str, Any],
    instead: loading.Instead | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The model and the loading information; errors of Transformers' in our words.

    Args:
        path_or_id: as for `load`.
        options: the user's choices.
        auto_class: the class that loads; None is `AutoModelForCausalLM`.
        device: where the model goes.
        rest: more for `from_pretrained`.
        instead: see `Pending`.

    Raises:
        CheckpointError: files that Transformers wants are not there.
        UnsupportedModelError: the class does not load such a model.
    """
    model_class, where = from_where(path_or_id, rest["config"], auto_class)
    with loading.pending(options, instead) as pending:
        try:
            return model_class.from_pretrained(
                **where,
                device_map={"": device},
                experts_implementation=experts.NAME,
                output_loading_info=True,
                **rest,
            )
        except ValueError as error:
            if not str(error).startswith("Unrecognized configuration class"):
                raise
            raise UnsupportedModelError(not_of_the_class(rest["config"], auto_class)) from error
        except OSError as error:
            if pending.found_files:  # the disk's, the user's progress function's, ...
                raise
            subfolder = rest.get("subfolder") or ""
            raise CheckpointError(why_unreadable(path_or_id, subfolder, error)) from error
