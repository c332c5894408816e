"""How many tokens a model can take, and so how much KV cache is worth leaving room for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotexperts.integrations.transformers.load import LoadOptions


def max_positions(config: Any) -> int | None:
    """Tokens of prompt and answer together; None where the configuration sets no limit."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def within_positions(options: LoadOptions, config: Any) -> LoadOptions:
    """The options with no more KV cache than one sequence can fill, unless the user chose it."""
    positions = max_positions(config)
    if options.is_kv_chosen or positions is None:
        return options
    return replace(options, kv_tokens=min(options.kv_tokens, positions))
