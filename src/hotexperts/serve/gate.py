"""What every request passes first: the address, the key, the limits, the check of its body.

An ASGI application around another. What is behind it sees known paths and checked bodies only.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hotexperts.serve.call import CURRENT, Call
from hotexperts.serve.refusal import Refusal
from hotexperts.serve.requests import CHAT, COMPLETIONS, parse

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_SECONDS = 30.0  # for a body to arrive
SEND_SECONDS = 60.0  # for a client to take a piece of its answer
RETRY_SECONDS = 1
_DRAIN_SECONDS, _DRAIN_BODIES = 5.0, 16  # of a refused body, so that its sender hears why
_POST, _GET = (CHAT, COMPLETIONS), ("/health", "/metrics", "/v1/models")
_REQUEST_ID = re.compile(r"[\w.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may do.

    Attributes:
        model: the name of the one they may ask for.
        body_nbytes: of a request.
        num_requests: answered or waiting at a time.
        api_key: to be sent with requests under `/v1`; None asks for none.
        hosts: names by which a browser may have come; None is any.
    """

    model: str
    body_nbytes: int
    num_requests: int
    api_key: str | None = None
    hosts: frozenset[str] | None = None


class Gate:
    """Refuses in OpenAI's form, or passes on.

    Args:
        app: what is behind.
        limits: see there.
    """

    def __init__(self, app: Application, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._num_requests = 0
        self._passages: set[_Passage] = set()

    def cut(self) -> None:
        """End every answer now: a stream breaks off, the others become 503."""
        for passage in self._passages:
            passage.cut()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; lifespan events pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        try:
            self._check(scope, _headers(scope))
            if scope["method"] == "GET":
                await self._app(scope, receive, send)
            else:
                await self._answer(scope, body, receive, send)
        except Refusal as refusal:
            await body.drain(_DRAIN_BODIES * self._limits.body_nbytes)
            await _send_refusal(send, refusal)

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        """Refuse what needs no look at the body."""
        hosts = self._limits.hosts
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
        if hosts is not None and host not in hosts:
            raise Refusal(
                403,
                f"the name {host[:80]!r} is not one of this server's: take 127.0.0.1 or localhost, "
                "or start it with --api-key",
            )
        path, method = scope["path"], scope["method"]
        allowed = "POST" if path in _POST else "GET"
        if path not in _POST + _GET and not path.startswith("/v1/models/"):
            raise Refusal(
                404,
                f"there is no {path[:80]!r} here: use one of {', '.join(_POST + _GET)}",
                code="unknown_url",
            )
        if path.startswith("/v1/"):
            self._check_key(headers.get("authorization", ""))
        if method != allowed:
            raise Refusal(405, f"{path[:80]} is no place for {method[:20]}: use {allowed}")

    def _check_key(self, authorization: str) -> None:
        if self._limits.api_key is None:
            return
        scheme, _, key = authorization.partition(" ")
        expected = self._limits.api_key.encode()
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), expected):
            what = "wrong" if authorization else "missing"
            raise Refusal(
                401,
                f"the API key is {what}: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )

    async def _answer(self, scope: Scope, body: _Body, receive: Receive, send: Send) -> None:
        headers, limits = _headers(scope), self._limits
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":  # which browsers send to other sites after asking
            raise Refusal(
                415, "the body is no JSON by its type: send 'Content-Type: application/json'"
            )
        if self._num_requests >= limits.num_requests:
            raise Refusal(
                429,
                f"{limits.num_requests} requests are being answered or wait: try again",
                code="too_many_requests",
                retry_after=RETRY_SECONDS,
            )
        self._num_requests += 1
        try:
            data = await body.read(limits.body_nbytes, headers.get("content-length"))
            passed, sampling = parse(scope["path"], data, limits.model)
            call = Call(sampling)
            CURRENT.set(call)
            inner = {**scope, "headers": _inner_headers(headers)}
            passage = _Passage(self._app, call)
            self._passages.add(passage)
            try:
                await passage.run(inner, json.dumps(passed).encode(), receive, send)
            finally:
                self._passages.remove(passage)
        finally:
            self._num_requests -= 1


class _Body:
    """The body of a request, read with limits or thrown away with limits."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_done = False

    async def read(self, most_nbytes: int, announced: str | None) -> bytes:
        """All of it.

        Raises:
            Refusal: it is too large, or takes too long.
        """
        too_large = Refusal(
            413,
            f"the body has more than {most_nbytes} bytes: send less, or start the server with a "
            "larger --max-body",
        )
        if announced is not None and not re.fullmatch(r"\d{1,18}", announced, re.ASCII):
            raise Refusal(400, f"Content-Length is {announced[:40]!r}: give a number of bytes")
        if announced is not None and int(announced) > most_nbytes:
            raise too_large
        try:
            found = await asyncio.wait_for(self._take(most_nbytes), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise Refusal(
                408, f"the body took more than {BODY_SECONDS:g} s: send it faster"
            ) from None
        if len(found) > most_nbytes:
            raise too_large
        return found

    async def drain(self, most_nbytes: int) -> None:
        """Throw away what is left: who still sends does not read an answer."""
        with suppress(asyncio.TimeoutError, Refusal):
            await asyncio.wait_for(self._take(most_nbytes, is_kept=False), _DRAIN_SECONDS)

    async def _take(self, most_nbytes: int, *, is_kept: bool = True) -> bytes:
        """The rest, or a little more of it than `most_nbytes`."""
        found, num_bytes = bytearray(), 0
        while not self._is_done and num_bytes <= most_nbytes:
            message = await self._receive()
            self._is_done = not message.get("more_body", False)
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the body ended early: send all of it")
            num_bytes += len(message["body"])
            found += message["body"] if is_kept else b""
        return bytes(found)


class _Passage:
    """One request on its way through what is behind, until it is answered or its client is gone."""

    def __init__(self, app: Application, call: Call) -> None:
        self._app = app
        self._call = call
        self._gone = asyncio.Event()
        self._is_cut = self._has_begun = False

    def cut(self) -> None:
        """End it now."""
        self._is_cut = True
        self._gone.set()

    async def run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Pass on, and stop the work where nobody waits for it any more.

        Raises:
            Refusal: it was cut before the answer began.
        """
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def inner_receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def inner_send(message: dict[str, Any]) -> None:
            if self._gone.is_set():  # an answer that was cut must not look like one that ended
                return
            self._has_begun = True
            try:
                await asyncio.wait_for(send(message), SEND_SECONDS)
            except asyncio.TimeoutError:
                self._gone.set()
                raise

        work = asyncio.ensure_future(self._app(scope, inner_receive, inner_send))
        others = [asyncio.ensure_future(self._gone.wait()), asyncio.ensure_future(_end(receive))]
        try:
            await asyncio.wait([work, *others], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._call.is_gone.set()
            was_done = work.done() and not self._gone.is_set()
            self._gone.set()
            for task in (work, *others):
                task.cancel()
            await asyncio.gather(work, *others, return_exceptions=True)
        if was_done:
            work.result()
        elif self._is_cut and not self._has_begun:
            raise Refusal(503, "the server is ending: try again later", retry_after=RETRY_SECONDS)


async def _end(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _inner_headers(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    """What the handlers may see: the request id becomes the answer's."""
    found = [(b"content-type", b"application/json")]
    name = headers.get("x-request-id", "")
    return [*found, (b"x-request-id", name.encode())] if _REQUEST_ID.fullmatch(name) else found


async def _send_refusal(send: Send, refusal: Refusal) -> None:
    data = json.dumps(refusal.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(data))}
    pairs = [(n.encode(), v.encode()) for n, v in (headers | refusal.headers).items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": pairs})
    await send({"type": "http.response.body", "body": data})
