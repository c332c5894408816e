"""A client of an ASGI application whose messages are given by hand."""

from __future__ import annotations

import asyncio
import json
from typing import Any

BODY = {"model": "m", "prompt": "hi", "max_tokens": 3}
JSON = {"content-type": "application/json", "host": "localhost:8000"}


class Client:
    """One request, whose messages are given by hand."""

    def __init__(
        self, app: Any, path: str, method: str = "POST", read_seconds: float = 0, **headers: str
    ) -> None:
        pairs = {name.replace("_", "-"): value for name, value in (JSON | headers).items()}
        scope = {
            "type": "http",
            "path": path,
            "method": method,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in pairs.items()],
        }
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self.got: list[Any] = []
        self._read_seconds = read_seconds
        self.task = asyncio.ensure_future(app(scope, self.sent.get, self._send))

    async def _send(self, message: Any) -> None:
        await asyncio.sleep(self._read_seconds)
        self.got.append(message)

    def body(self, data: bytes = json.dumps(BODY).encode(), more_body: bool = False) -> None:
        self.sent.put_nowait({"type": "http.request", "body": data, "more_body": more_body})

    def leave(self) -> None:
        self.sent.put_nowait({"type": "http.disconnect"})

    async def status(self) -> int:
        await asyncio.wait_for(self.task, 10)
        return int(self.got[0]["status"])
