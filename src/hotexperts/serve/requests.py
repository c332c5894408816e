"""From the bytes of a request to what Transformers' handlers get: nothing in it is unchecked.

A field that has no effect here is refused unless it asks for what happens anyway.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from hotexperts.config import LOWEST_TEMPERATURE
from hotexperts.serve.call import Sampling
from hotexperts.serve.chat import check_messages, check_template_arguments, check_tools
from hotexperts.serve.refusal import Refusal, refuse_field

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_MOST_STOPS = 4  # OpenAI's
_MOST_DEPTH = 64
_HIGHEST_TEMPERATURE = 2.0  # OpenAI's
_LABELS = {"metadata", "user", "safety_identifier", "prompt_cache_key"}  # without effect anywhere
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # what may be said of what cannot be had
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
}
_BOTH = {"model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop"}
_OWN = {
    CHAT: {"messages", "max_completion_tokens", "tools", "chat_template_kwargs"},
    COMPLETIONS: {"prompt"},
}


def parse(path: str, data: bytes, model: str) -> tuple[dict[str, Any], Sampling]:
    """Check a request.

    Args:
        path: `CHAT` or `COMPLETIONS`.
        data: its body.
        model: the name of the one that is served.

    Returns:
        The fields for Transformers' handler, and how to answer.

    Raises:
        Refusal: anything else than a request that can be answered as it says.
    """
    body = {name: value for name, value in _read(data).items() if value is not None}
    _check_fields(body, path)
    _check_model(body.get("model"), model)
    passed: dict[str, Any] = {"model": model, "stream": _flag(body, "stream")}
    options = body.get("stream_options", {})
    if not isinstance(options, dict) or not set(options) <= {"include_usage"}:
        refuse_field("stream_options", "may have include_usage only")
    if path == CHAT:
        passed["messages"] = check_messages(body.get("messages"))
        passed["tools"] = check_tools(body.get("tools"))
        passed["chat_template_kwargs"] = check_template_arguments(
            body.get("chat_template_kwargs", {})
        )
    else:
        passed["prompt"] = _prompt(body.get("prompt"))
    return passed, _sampling(body, None if path == CHAT else DEFAULT_COMPLETION_TOKENS)


def _read(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON ({str(error)[:200]}): send an object") from error
    if not isinstance(body, dict):
        raise Refusal(400, "the body is no JSON object: send one")
    _check_values(body)
    return body


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_values(body: dict[str, Any]) -> None:
    """Refuse nesting that templates would recurse into, and halves of characters."""
    left: list[tuple[Any, int]] = [(body, 1)]
    while left:
        value, depth = left.pop()
        if depth > _MOST_DEPTH:
            raise Refusal(400, f"the body is nested deeper than {_MOST_DEPTH} levels: send fewer")
        if isinstance(value, str):
            _check_characters(value)
        elif isinstance(value, dict):
            left.extend((part, depth + 1) for pair in value.items() for part in pair)
        elif isinstance(value, list):
            left.extend((part, depth + 1) for part in value)


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refusal(
            400, f"a text in the body has half a character at place {error.start}: send a whole one"
        ) from error


def _check_fields(body: dict[str, Any], path: str) -> None:
    known = _BOTH | _OWN[path] | _LABELS
    for name in sorted(set(body) - known):
        if name not in _NEUTRAL:
            refuse_field(name[:80], "is not a field that this server knows: leave it out")
        allowed = _NEUTRAL[name]
        if not any(body[name] == value for value in allowed):
            shown = " or ".join(json.dumps(value) for value in allowed)
            refuse_field(name, f"is not supported: leave it out, or give {shown}")


def _check_model(wanted: Any, model: str) -> None:
    if wanted is None:
        refuse_field("model", f"is missing: give {model!r}")
    if wanted != model:
        raise Refusal(
            404,
            f"the model {str(wanted)[:200]!r} does not exist: take {model!r}",
            param="model",
            code="model_not_found",
        )


def _prompt(prompt: Any) -> str:
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        refuse_field("prompt", "must be one text that is not empty")
    return str(prompt)


def _sampling(body: dict[str, Any], default_tokens: int | None) -> Sampling:
    asked = [n for n in ("max_completion_tokens", "max_tokens") if n in body]
    for name in asked:
        _number(body, name, int, lambda value: value >= 1, "at least 1")
    return Sampling(
        body[asked[0]] if asked else None,
        default_tokens,
        _number(
            body,
            "temperature",
            float,
            lambda x: x == 0 or LOWEST_TEMPERATURE <= x <= _HIGHEST_TEMPERATURE,
            f"0, or {LOWEST_TEMPERATURE:g} to {_HIGHEST_TEMPERATURE:g}",
        ),
        _number(body, "top_p", float, lambda x: 0 < x <= 1, "above 0 and at most 1"),
        _number(body, "seed", int, lambda x: -(2**63) <= x < 2**64, "of 64 bits"),
        _stop(body.get("stop", [])),
    )


def _stop(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    is_fine = isinstance(stops, list) and len(stops) <= _MOST_STOPS
    if not is_fine or not all(isinstance(text, str) and text for text in stops):
        refuse_field(
            "stop", f"must be a text, or at most {_MOST_STOPS} of them, none of them empty"
        )
    return tuple(stops)


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        refuse_field(name, "must be true or false")
    return bool(value)


def _number(
    body: dict[str, Any], name: str, kind: type, fits: Callable[[Any], bool], wanted: str
) -> Any:
    value = body.get(name)
    if value is None:
        return None
    kinds = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not fits(value):
        what = "an integer" if kind is int else "a number"
        refuse_field(name, f"is {str(value)[:40]}: give {what}, {wanted}")
    return value
