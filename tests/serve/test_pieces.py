"""Stop texts, answers put together, addresses, and the choice of an engine."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotexperts import known_versions
from hotexperts.errors import ConfigError
from hotexperts.serve import address
from hotexperts.serve.collect import collect
from hotexperts.serve.engine import Engine, choose
from hotexperts.serve.refusal import Refusal
from hotexperts.serve.stops import StopFilter


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
)
def test_pieces_end_where_the_whole_text_does(pieces: list[str], stops: list[str]) -> None:
    """Cut as the first stop text comes to its end: what a later one would cut is not known yet."""
    stop_filter, shown, text = StopFilter(stops), "", ""
    for piece in pieces:
        text += piece
        shown += stop_filter.feed(piece)
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            assert stop_filter.found
            assert shown == text[: min(places)]
            assert stop_filter.feed("more") == stop_filter.flush() == ""
            return
    assert not stop_filter.found
    assert shown + stop_filter.flush() == text


def test_only_what_may_become_a_stop_text_is_held_back() -> None:
    stop_filter = StopFilter(["END", "\n\n"])
    assert [stop_filter.feed(piece) for piece in ("a E", "N", "d\n", "b", "EN")] == [
        "a ",
        "",
        "ENd",
        "\nb",
        "",
    ]
    assert stop_filter.flush() == "EN"


def collected(*chunks: dict[str, Any]) -> dict[str, Any]:
    async def parts() -> AsyncIterator[str]:
        for chunk in chunks:
            yield f"data: {json.dumps(chunk)}\n\n"

    return asyncio.run(collect(parts()))


def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {
        "id": "1",
        "created": 2,
        "model": "m",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
        "usage": {"total_tokens": 3},
    }


def test_a_chat_is_put_together() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    found = collected(
        chunk(role="assistant"),
        chunk(reasoning_content="hm"),
        chunk(content="a"),
        chunk(content="b"),
        chunk(tool_calls=[{"index": 0, **call}]),
        chunk("tool_calls"),
    )
    message = {
        "role": "assistant",
        "reasoning_content": "hm",
        "content": "ab",
        "tool_calls": [call],
    }
    assert found == {
        "id": "1",
        "created": 2,
        "model": "m",
        "usage": {"total_tokens": 3},
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
    }
    empty = collected(chunk(role="assistant"), chunk("stop"))["choices"][0]["message"]
    assert empty == {"role": "assistant", "content": ""}


def test_a_stream_that_failed_is_a_failure() -> None:
    with pytest.raises(Refusal, match="why") as caught:
        collected(chunk(content="a"), {"error": "why"})
    assert caught.value.status == 500
    assert caught.value.body()["error"]["type"] == "server_error"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "127.8.9.1"])
def test_this_machine_needs_no_key(host: str) -> None:
    address.check_access(host, None)
    names = address.local_names(host)
    assert names is not None
    assert {"localhost", f"[{host}]" if ":" in host else host} <= names


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_others_need_one(host: str) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines: give --api-key"):
        address.check_access(host, None)
    address.check_access(host, "key")
    assert address.local_names(host) is None


@pytest.mark.parametrize("key", ["", "a b", "k\n", "\xe9", "x" * 513])
def test_a_key_must_fit_a_header(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key: give 1 to 512 visible ASCII"):
        address.check_access("127.0.0.1", key)


def test_an_address_in_use_is_said_before_the_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen at 127\.0\.0\.1:{port} \(Address"):
            address.reserve("127.0.0.1", port)
    with address.reserve("127.0.0.1", 0) as found, pytest.raises(ConnectionRefusedError):
        socket.create_connection(found.getsockname())
    for host in ("no host", ""):
        with pytest.raises(ConfigError, match="no such address"):
            address.check_access(host, None)


def test_the_engine_is_chosen_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    versions: dict[str, str | None] = {"found": "0.26.0"}
    monkeypatch.setattr(known_versions, "installed", lambda *names: versions["found"])
    assert choose(Engine.AUTO, is_demo=False) == (Engine.VLLM, "vLLM 0.26.0 is installed")
    assert choose(Engine.AUTO, is_demo=True)[0] is Engine.TRANSFORMERS
    assert choose(Engine.TRANSFORMERS, is_demo=False) == (Engine.TRANSFORMERS, "as asked")
    versions["found"] = None
    why = "vLLM is not installed in this environment"
    assert choose(Engine.AUTO, is_demo=False) == (Engine.TRANSFORMERS, why)
    with pytest.raises(ConfigError, match=f"--engine vllm: {why}"):
        choose(Engine.VLLM, is_demo=False)
