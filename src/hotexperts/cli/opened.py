"""A cached model and its tokenizer, as the commands that answer prompts open them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotexperts.cli import options
from hotexperts.cli.console import loading, note, quiet_libraries
from hotexperts.cli.text import load_tokenizer
from hotexperts.config import DEFAULT_KV_TOKENS
from hotexperts.integrations.transformers.gguf_checkpoint import find_gguf
from hotexperts.integrations.transformers.positions import max_positions
from hotexperts.integrations.transformers.repository import read_config
from hotexperts.transformers import load


@dataclass(frozen=True, slots=True)
class Opened:
    """What a command answers prompts with.

    Attributes:
        path: of the checkpoint.
        model: with an `expert_cache`.
        tokenizer: its tokenizer.
        context: tokens of prompt and answer together that memory was planned for.
        load_seconds: how long the model took to load.
    """

    path: str
    model: Any
    tokenizer: Any
    context: int
    load_seconds: float


def open_model(
    path: str,
    *,
    context: int | None,
    trust_remote_code: bool,
    prepare: Callable[[Any], None] = lambda tokenizer: None,
    **load_options: Any,
) -> Opened:
    """Load the tokenizer, then the model, with a bar on stderr.

    Args:
        path: of the checkpoint.
        context: tokens of prompt and answer together; None takes the default, or less where the
            model has fewer positions.
        trust_remote_code: run Python code of the checkpoint.
        prepare: called with the tokenizer, before the long part begins.
        **load_options: more for `load`.

    Raises:
        ConfigError: a context beyond the model's positions.
        HotExpertsError: no tokenizer, or whatever `load` and `prepare` refuse.
    """
    gguf = find_gguf(path)
    if gguf is not None and gguf != Path(path):
        path = str(gguf)
        note(f"the model is {path}")
    with quiet_libraries():
        config, _ = read_config(path, {"trust_remote_code": trust_remote_code})
    length = options.context(context, DEFAULT_KV_TOKENS, max_positions(config))
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    prepare(tokenizer)
    load_options |= {"kv_tokens": length, "trust_remote_code": trust_remote_code}
    start = time.perf_counter()
    with loading("loading experts") as progress:
        model = load(path, progress=progress, **load_options)
    seconds = time.perf_counter() - start
    if model.expert_cache.store_reason is not None:
        note(f"experts in {model.expert_cache.store_reason}")
    return Opened(path, model, tokenizer, length, seconds)
