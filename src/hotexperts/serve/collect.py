"""A streamed answer put together again: what a client gets that did not ask for a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from hotexperts.serve.refusal import Refusal

_TEXTS = ("content", "reasoning_content")


async def collect(parts: AsyncIterator[str]) -> dict[str, Any]:
    """The answer.

    Args:
        parts: server-sent events, one or several a part.

    Raises:
        Refusal: the stream ended in an error.
    """
    choice: dict[str, Any] = {"index": 0}
    last: dict[str, Any] = {}
    async for part in parts:
        for line in part.splitlines():
            if not line.startswith("data: "):
                continue
            last = json.loads(line.removeprefix("data: "))
            if "error" in last:
                raise Refusal(500, str(last["error"]))
            _add(choice, last["choices"][0])
    if "message" in choice and "tool_calls" not in choice["message"]:
        choice["message"].setdefault("content", "")
    kind = "chat.completion" if "message" in choice else "text_completion"
    kept = {name: last[name] for name in ("id", "created", "model", "usage")}
    return {**kept, "object": kind, "choices": [choice]}


def _add(choice: dict[str, Any], new: dict[str, Any]) -> None:
    if "delta" in new:
        message = choice.setdefault("message", {"role": "assistant"})
        for name in _TEXTS:
            if new["delta"].get(name):
                message[name] = message.get(name, "") + new["delta"][name]
        for call in new["delta"].get("tool_calls") or []:
            whole = {name: value for name, value in call.items() if name != "index"}
            message.setdefault("tool_calls", []).append(whole)
    else:
        choice["text"] = choice.get("text", "") + new.get("text", "")
    choice["finish_reason"] = new.get("finish_reason")
