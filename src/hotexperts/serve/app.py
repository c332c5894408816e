"""Transformers' own server application, around one cached model."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from hotexperts.integrations.transformers.handle import ExpertCache
from hotexperts.observe.exporter import Collector
from hotexperts.serve import compat
from hotexperts.serve.call import CURRENT
from hotexperts.serve.collect import collect
from hotexperts.serve.refusal import Refusal
from hotexperts.serve.turns import Turns, generation_config

_ARGUMENTS = ("messages", "load_audio_from_video", "num_frames")  # the handler gives them
_ERROR = 'data: {"error"'  # in generated text the quotes would be escaped


@dataclass(frozen=True)
class Served:
    """The model, and what Transformers' application asks about it.

    It stands in for their `ModelManager` and `GenerationState`, which load what requests name.

    Attributes:
        name: by which clients ask for it.
        model: with an `expert_cache`.
        tokenizer: its tokenizer.
        turns: generates.
        created: when it was loaded, seconds since 1970.
    """

    name: str
    model: Any
    tokenizer: Any
    turns: Turns
    created: int = field(default_factory=lambda: int(time.time()))

    def list_models(self) -> list[dict[str, Any]]:
        """The only one."""
        entry = {"id": self.name, "object": "model", "created": self.created}
        return [{**entry, "owned_by": "hotexperts"}]

    get_gen_models = list_models  # its name in Transformers 5.17

    def get_model_modality(self, model: Any, processor: Any = None) -> Any:
        """Text."""
        return compat.names().text_modality

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        """No: all requests would be answered with the first one's temperature."""
        return False

    def get_manager(self, model_id: str, use_cb: bool = False) -> Turns:
        """What generates."""
        return self.turns

    def is_cb_alive(self) -> bool:
        """What `/health` asks."""
        return not self.turns.is_broken

    def shutdown(self) -> None:
        """Called at the end; the model is kept for its state to be saved."""


def build_app(served: Served) -> Any:
    """The application: completions, chat, models, health and metrics."""
    names = compat.names()
    parts = {
        "model_manager": served,
        "generation_state": served,
        "chat_handler": _handler(names.chat, served),
        "completion_handler": _handler(names.completion, served),
    }
    parameters = inspect.signature(names.build_server).parameters.values()
    others = [p.name for p in parameters if p.default is p.empty and p.name not in parts]
    app = names.build_server(**parts, **dict.fromkeys(others))  # whose paths no request reaches
    _add_routes(app, served)
    return app


def _handler(base: Any, served: Served) -> Any:
    class Handler(base):
        """Theirs, with our model, our sampling, and one way to generate."""

        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            if "messages" in body:
                _check_template(served.tokenizer, body["chat_template_kwargs"])
            return await super().handle_request(body, request_id)

        def _validate_request(self, body: dict[str, Any]) -> None:
            """The gate did."""

        def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
            return served.name, served.model, served.tokenizer

        def _build_generation_config(self, body: Any, base: Any, use_cb: bool = False) -> Any:
            return generation_config(base, CURRENT.get().sampling)

        def _streaming(self, *args: Any, **kwargs: Any) -> Any:
            response = super()._streaming(*args, **kwargs)
            response.body_iterator = _with_end(response.body_iterator)
            return response

        async def _non_streaming(self, *args: Any, **kwargs: Any) -> Any:
            from fastapi.responses import JSONResponse

            parts = super()._streaming(*args, **kwargs).body_iterator
            async with aclosing(parts):
                return JSONResponse(await collect(parts))

    return Handler(served, served)


async def _with_end(parts: Any) -> AsyncIterator[str]:
    """OpenAI's mark after the last event, but for streams that ended in an error."""
    part = ""
    async with aclosing(parts):
        async for part in parts:
            yield part
    if _ERROR not in part:
        yield "data: [DONE]\n\n"


def _check_template(tokenizer: Any, arguments: dict[str, Any]) -> None:
    """Refuse a chat without a template, and arguments that are not the template's."""
    if not getattr(tokenizer, "chat_template", None):
        raise Refusal(
            400,
            "the model has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE",
            param="messages",
        )
    taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, *_ARGUMENTS}
    wrong = sorted(taken.intersection(arguments))
    if wrong:
        raise Refusal(
            400, f"{wrong[0]} is not the template's: leave it out", param="chat_template_kwargs"
        )


def _add_routes(app: Any, served: Served) -> None:
    from fastapi.responses import JSONResponse, Response
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    cache: ExpertCache = served.model.expert_cache
    registry = CollectorRegistry()
    registry.register(Collector(lambda: {0: cache.counters()}))

    async def metrics(request: Any) -> Any:
        text = await asyncio.to_thread(generate_latest, registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def model(request: Any) -> Any:
        name = request.path_params["name"]
        if name != served.name:
            raise Refusal(
                404,
                f"the model {name[:200]!r} does not exist: take one that /v1/models lists",
                code="model_not_found",
            )
        return JSONResponse(served.list_models()[0])

    app.router.add_route("/metrics", metrics, methods=["GET"])
    app.router.add_route("/v1/models/{name:path}", model, methods=["GET"])
    _add_errors(app)


def _add_errors(app: Any) -> None:
    from fastapi.responses import JSONResponse
    from jinja2 import TemplateError

    async def refused(request: Any, error: Refusal) -> Any:
        return JSONResponse(error.body(), error.status, error.headers)

    async def no_template(request: Any, error: TemplateError) -> Any:
        message = (
            f"the chat template does not take these messages ({str(error)[:200]}): send roles in "
            "an order that it takes"
        )
        return await refused(request, Refusal(400, message, param="messages"))

    async def failed(request: Any, error: Exception) -> Any:
        return await refused(
            request, Refusal(500, "the server failed, its log says why: try again, or report it")
        )

    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(TemplateError, no_template)
    app.add_exception_handler(Exception, failed)
