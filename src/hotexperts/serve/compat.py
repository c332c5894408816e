"""Everything of Transformers' own server that ours is made of, checked before first use.

Its names are looked up here and nowhere else, so that a new release fails in one place, at start.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from hotexperts import known_versions
from hotexperts.errors import UnsupportedOperationError

_OVERRIDDEN = (
    "handle_request",
    "_validate_request",
    "_resolve_model",
    "_build_generation_config",
    "_streaming",
    "_non_streaming",
)


class ServerNames(NamedTuple):
    """The names in use, found and checked.

    Attributes:
        build_server: makes the FastAPI application of handlers.
        chat: handler of chat completions; its methods in `_OVERRIDDEN` are ours.
        completion: handler of completions, likewise.
        text_modality: what a text model is to them.
        stream_error: in a queue of text, the end by an error.
        events_to_chunks: what a parser of answers found, as items for that queue.
    """

    build_server: Callable[..., Any]
    chat: type
    completion: type
    text_modality: Any
    stream_error: type
    events_to_chunks: Callable[..., list[Any]]


@lru_cache(maxsize=1)
def names() -> ServerNames:
    """Find and check the names.

    Raises:
        ModuleNotFoundError: FastAPI, uvicorn, `openai` or `prometheus_client` is not installed.
        UnsupportedOperationError: this Transformers lacks one of the names.
    """
    import fastapi  # noqa: F401 (without these Transformers' modules import, and then fail)
    import openai  # noqa: F401
    import prometheus_client  # noqa: F401
    import transformers
    import uvicorn  # noqa: F401

    try:
        from transformers.cli.serving import chat_completion, completion, server, utils

        found = ServerNames(
            server.build_server,
            chat_completion.ChatCompletionHandler,
            completion.CompletionHandler,
            utils.Modality.LLM,
            utils._StreamError,
            utils.response_events_to_chunks,
        )
        for handler in (found.chat, found.completion):
            for name in _OVERRIDDEN:
                getattr(handler, name)
        streaming = inspect.signature(utils.BaseGenerateManager.generate_streaming)
        expected = "self model processor inputs gen_config request_id response_parser"
        if list(streaming.parameters) != expected.split():
            raise AttributeError(f"generate_streaming takes {streaming}")
    except (ImportError, AttributeError) as error:
        raise UnsupportedOperationError(
            f"the server of Transformers {transformers.__version__} is not one that serve knows "
            f"({error}): install one of {', '.join(known_versions.TRANSFORMERS)}"
        ) from error
    return found
