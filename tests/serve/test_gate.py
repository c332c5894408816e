"""The gate around an application that tells what it got."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hotexperts.serve import gate
from hotexperts.serve.call import CURRENT
from hotexperts.serve.gate import Gate, Limits
from serve.client import Client

LIMITS = Limits("m", body_nbytes=1000, num_requests=1)


class Inner:
    """Answers with what it was given; may first wait for something."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.was_cancelled = False
        self.bodies: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            self.bodies.append(json.loads((await receive())["body"]))
            self.call = CURRENT.get()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        await send({"type": "http.response.start", "status": 200, "headers": scope["headers"]})
        await send({"type": "http.response.body", "body": b"{}"})


async def ask(app: Any, path: str = "/v1/completions", **headers: str) -> int:
    client = Client(app, path, **headers)
    client.body()
    return await client.status()


def test_only_what_was_checked_is_passed_on() -> None:
    async def run() -> None:
        inner = Inner()
        client = Client(Gate(inner, LIMITS), "/v1/completions", x_request_id="r-1", cookie="c")
        client.body()
        assert await client.status() == 200
        assert inner.bodies == [{"model": "m", "stream": False, "prompt": "hi"}]
        assert inner.call.sampling.max_tokens == 3
        assert dict(client.got[0]["headers"]) == {
            b"content-type": b"application/json",
            b"x-request-id": b"r-1",
        }

    asyncio.run(run())


def test_keys_and_names_of_hosts() -> None:
    async def run() -> None:
        app = Gate(Inner(), Limits("m", 1000, 1, "secret", frozenset({"localhost", "[::1]"})))
        assert await ask(app) == 401
        assert await ask(app, authorization="Basic secret") == 401
        assert await ask(app, authorization="Bearer secre\xe9") == 401
        assert await ask(app, authorization="bearer secret") == 200
        assert await ask(app, "/health", method="GET") == 200, "which asks for no key"
        assert await ask(app, authorization="Bearer secret", host="[::1]:8000") == 200
        assert await ask(app, authorization="Bearer secret", host="evil.example") == 403

    asyncio.run(run())


def test_a_body_is_limited_by_what_comes_not_by_what_is_announced() -> None:
    async def run() -> None:
        app = Gate(Inner(), LIMITS)
        assert await ask(app, content_length="1001") == 413
        client = Client(app, "/v1/completions")
        for _ in range(30):
            client.body(b" " * 100, more_body=True)
        client.body(b"")
        assert await client.status() == 413
        assert client.sent.empty(), "it was read to its end, so that its sender hears why"
        assert await ask(app) == 200, "and it no longer counts"

    asyncio.run(run())


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(gate, "_DRAIN_SECONDS", 0.05)

    async def run() -> None:
        app = Gate(Inner(), LIMITS)
        client = Client(app, "/v1/completions")
        client.body(b"{", more_body=True)
        assert await client.status() == 408
        client = Client(app, "/v1/completions")
        client.body(b"{", more_body=True)
        client.leave()
        assert await client.status() == 400
        assert await ask(app) == 200

    asyncio.run(run())


def test_who_leaves_makes_room() -> None:
    async def run() -> None:
        inner = Inner()
        inner.go_on.clear()
        app = Gate(inner, LIMITS)
        first = Client(app, "/v1/completions")
        first.body()
        while not inner.bodies:
            await asyncio.sleep(0)
        second = Client(app, "/v1/completions")
        second.body()
        assert await second.status() == 429
        assert (b"retry-after", b"1") in second.got[0]["headers"]
        assert not inner.call.is_gone.is_set()
        first.leave()
        await asyncio.wait_for(first.task, 10)
        assert inner.call.is_gone.is_set()
        assert inner.was_cancelled
        inner.go_on.set()
        assert await ask(app) == 200

    asyncio.run(run())


def test_who_does_not_read_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "SEND_SECONDS", 0.05)

    async def run() -> None:
        inner = Inner()
        app = Gate(inner, LIMITS)
        client = Client(app, "/v1/completions", read_seconds=60)
        client.body()
        await asyncio.wait_for(client.task, 10)
        assert inner.call.is_gone.is_set()
        assert await ask(app) == 200

    asyncio.run(run())


def test_a_fault_behind_is_not_swallowed() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    async def run() -> None:
        client = Client(Gate(broken, LIMITS), "/v1/completions")
        client.body()
        with pytest.raises(ZeroDivisionError):
            await client.status()

    asyncio.run(run())


def test_an_answer_that_is_cut_does_not_look_like_one_that_ended() -> None:
    """Though what is behind ends its stream in order when it hears that the client is gone."""

    async def orderly(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if scope["path"] == "/v1/completions":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        begun.set()
        await receive()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def run() -> None:
        app = Gate(orderly, Limits("m", 1000, 2))
        client = Client(app, "/v1/completions")
        client.body()
        await begun.wait()
        begun.clear()
        other = Client(app, "/v1/chat/completions")
        other.body(b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}')
        await begun.wait()
        app.cut()
        assert await client.status() == 200
        assert [message["type"] for message in client.got] == ["http.response.start"]
        assert await other.status() == 503

    begun = asyncio.Event()
    asyncio.run(run())
