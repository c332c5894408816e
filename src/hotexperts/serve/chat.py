"""The messages and tools of a chat request, checked: text only, nothing that names a file."""

from __future__ import annotations

import json
from typing import Any

from hotexperts.serve.refusal import refuse_field

_ROLES = ("system", "developer", "user", "assistant", "tool")
_WITHOUT_EFFECT = {"name", "refusal", "annotations", "reasoning_content"}  # clients send them back
_TEXT_KINDS = ("text", "input_text", "output_text")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages, with what a template sees of them.

    Raises:
        Refusal: none, or one that holds something else than text and calls of tools.
    """
    if not isinstance(messages, list) or not messages:
        refuse_field("messages", "must be a list of at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        refuse_field(where, f"must be an object with a role, one of {', '.join(_ROLES)}")
    given = {name: value for name, value in message.items() if value not in (None, [])}
    known = {"role", "content", "tool_calls", "tool_call_id"}
    unknown = sorted(set(given) - known - _WITHOUT_EFFECT)
    if unknown:
        refuse_field(where, f"has {unknown[0][:80]}, which is not supported: leave it out")
    checked = {"role": message["role"], "content": _text(message.get("content"), where)}
    if "tool_calls" in given:
        calls = given["tool_calls"]
        if not isinstance(calls, list):
            refuse_field(f"{where}.tool_calls", "must be a list")
        checked["tool_calls"] = [_tool_call(call, f"{where}.tool_calls") for call in calls]
    elif message.get("content") is None:
        refuse_field(where, "has no content: send some")
    if "tool_call_id" in given:
        if not isinstance(given["tool_call_id"], str):
            refuse_field(f"{where}.tool_call_id", "must be a text")
        checked["tool_call_id"] = given["tool_call_id"]
    return checked


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        given = part if isinstance(part, dict) else {}
        if given.get("type") not in _TEXT_KINDS or not isinstance(given.get("text"), str):
            kind = str(given.get("type", part))[:80]
            refuse_field(f"{where}.content", f"must be text: this server takes no {kind!r}")
        texts.append(given["text"])
    return " ".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        refuse_field(where, "must have a function with a name")
    arguments = function.get("arguments", "{}")
    try:
        found = json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        refuse_field(f"{where}.function.arguments", "must be a text, a JSON object")
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    called = {"name": function["name"], "arguments": arguments}
    return {**named, "type": "function", "function": called}


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools; None for none.

    Raises:
        Refusal: anything else than functions with names.
    """
    if tools is None:
        return None
    if not isinstance(tools, list):
        refuse_field("tools", "must be a list of functions")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            refuse_field("tools", "must be functions with names")
    return tools or None


def check_template_arguments(arguments: Any) -> dict[str, Any]:
    """Arguments for the chat template, such as `enable_thinking`.

    Raises:
        Refusal: no object of plain values.
    """
    if not isinstance(arguments, dict):
        refuse_field("chat_template_kwargs", "must be an object")
    for name, value in arguments.items():
        if not name.isidentifier() or not isinstance(value, bool | int | float | str):
            refuse_field("chat_template_kwargs", f"has {name[:80]!r}: give names with plain values")
    return arguments
