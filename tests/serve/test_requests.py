"""What of a request reaches Transformers' handlers, and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotexperts.serve import requests
from hotexperts.serve.call import Sampling
from hotexperts.serve.refusal import Refusal
from hotexperts.serve.requests import CHAT, COMPLETIONS, parse

PATHS = (CHAT, COMPLETIONS)
LEAST = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "m", "prompt": "hi"},
}


def parsed(path: str, **more: Any) -> tuple[dict[str, Any], Sampling]:
    return parse(path, json.dumps(LEAST[path] | more).encode(), "m")


def refusal(path: str, **more: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parsed(path, **more)
    return caught.value


def test_what_is_asked_for_arrives() -> None:
    sampling = {"temperature": 0.5, "top_p": 1, "seed": -3, "max_tokens": 5}
    passed, found = parsed(COMPLETIONS, stream=True, stop="\n", **sampling)
    assert passed == {"model": "m", "stream": True, "prompt": "hi"}
    assert found == Sampling(5, 16, 0.5, 1, -3, ("\n",))
    passed, found = parsed(CHAT, max_completion_tokens=7, chat_template_kwargs={"think": False})
    assert passed["messages"] == [{"role": "user", "content": "hi"}]
    assert passed["chat_template_kwargs"] == {"think": False}
    assert found == Sampling(max_tokens=7)


def test_messages_keep_calls_of_tools_and_lose_what_clients_send_back() -> None:
    function = {"name": "f", "arguments": '{"x": 1}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "refusal": None,
            "audio": None,
        },
        {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    passed, _ = parsed(CHAT, messages=messages, tools=tools)
    assert passed["messages"] == [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    assert passed["tools"] == tools


@pytest.mark.parametrize("path", PATHS)
def test_a_field_without_effect_may_only_ask_for_what_happens_anyway(path: str) -> None:
    neutral = {"n": 1, "logprobs": False, "presence_penalty": 0.0, "stop": None, "user": "u"}
    assert parsed(path, **neutral) == parsed(path)
    assert parsed(path, stream_options={"include_usage": True}) == parsed(path)
    for name, value in (("n", 2), ("logprobs", True), ("presence_penalty", 0.1), ("echo", True)):
        found = refusal(path, **{name: value})
        assert (found.status, found.param) == (400, name)
        assert "is not supported: leave it out, or give" in str(found)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -1, "give a number, 0, or 0.0001 to 2"),
        ("temperature", 1e-9, "give a number, 0, or 0.0001 to 2"),
        ("temperature", "hot", "give a number"),
        ("top_p", 0, "above 0 and at most 1"),
        ("seed", 2**64, "of 64 bits"),
        ("seed", 1.5, "give an integer"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", True, "give an integer"),
        ("stop", [""], "none of them empty"),
        ("stop", ["a"] * 5, "at most 4"),
        ("stream", "yes", "must be true or false"),
        ("stream_options", {"x": 1}, "include_usage only"),
        ("generation_config", "{}", "is not a field that this server knows"),
        ("top_k", 5, "is not a field that this server knows"),
        ("suffix", "}", "is not supported"),
    ],
)
def test_a_value_that_cannot_take_effect_is_refused(
    path: str, name: str, value: Any, message: str
) -> None:
    found = refusal(path, **{name: value})
    assert (found.status, found.param) == (400, name)
    assert message in str(found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": ["hi"]}, "messages[0] must be an object with a role"),
        ({"messages": [{"role": "root", "content": "x"}]}, "with a role, one of system"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be text: this server takes no '3'"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}],
                    }
                ]
            },
            "messages[0].content must be text: this server takes no 'image_url'",
        ),
        ({"messages": [{"role": "user", "content": "x", "audio": {"id": "1"}}]}, "has audio"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "["}}],
                    }
                ]
            },
            "arguments must be a text, a JSON object",
        ),
        ({"tools": [{"type": "function"}]}, "tools must be functions with names"),
        ({"tool_choice": "required"}, "tool_choice is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"chat_template_kwargs": {"x": ["/etc"]}}, "give names with plain values"),
        ({"prompt": "x"}, "prompt is not a field"),
    ],
)
def test_chats_that_cannot_be_answered_are_refused(fields: dict[str, Any], message: str) -> None:
    found = refusal(CHAT, **fields)
    assert found.status == 400
    assert message in str(found)


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [1, 2], 7])
def test_a_prompt_is_one_text(prompt: Any) -> None:
    assert refusal(COMPLETIONS, prompt=prompt).param == "prompt"
    assert parsed(COMPLETIONS, prompt=["one"])[0]["prompt"] == "one"


def test_deep_bodies_are_refused() -> None:
    deep: Any = "x"
    for _ in range(70):
        deep = [deep]
    assert "deeper than 64 levels" in str(refusal(CHAT, metadata={"a": deep}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted(requests._BOTH | requests._OWN[CHAT] | set(requests._NEUTRAL)))
PARTS = st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name"])
OBJECTS = st.dictionaries(PARTS, JSON | st.dictionaries(PARTS, JSON))


@given(
    st.sampled_from(PATHS), st.dictionaries(FIELDS, OBJECTS | st.lists(OBJECTS) | JSON, max_size=3)
)
def test_any_fields_are_parsed_or_refused(path: str, fields: dict[str, Any]) -> None:
    data = json.dumps(LEAST[path] | fields).encode()
    found: Any = None
    with suppress(Refusal):
        found = parse(path, data, "m")
    assert found is None or found[0]["model"] == "m"


@given(st.binary())
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(Refusal):
        parse(CHAT, data, "m")
