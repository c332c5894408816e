"""The server itself: uvicorn around the gate around Transformers' application."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from hotexperts.serve.app import Served, build_app
from hotexperts.serve.gate import Gate, Limits

GRACE_SECONDS = 10  # at the end, for answers under way
_HEADER_NBYTES = 1 << 16


def serve(
    served: Served, limits: Limits, listener: socket.socket, announce: Callable[[], None]
) -> None:
    """Answer until SIGTERM or Ctrl-C; answers under way may then take `GRACE_SECONDS`.

    A second signal ends them at once, as does the end of that time: streams break off.

    Args:
        served: the model.
        limits: of what clients may do.
        listener: bound, not listening.
        announce: called when requests are answered.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of every request
    gate = Gate(build_app(served), limits)
    config = uvicorn.Config(
        gate,
        log_level="warning",
        access_log=False,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="on",
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=_HEADER_NBYTES,
        timeout_graceful_shutdown=2 * GRACE_SECONDS,  # for what cutting does not end
    )
    try:
        _Server(config, gate, announce).run([listener])
    finally:
        served.turns.close()


class _Server(uvicorn.Server):
    """Ends without a signal of its own, so that the state can be saved after it."""

    def __init__(self, config: Any, gate: Gate, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._gate = gate
        self._announce = announce
        self._is_ending = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers end, for a while."""
        timer = self._loop.call_later(GRACE_SECONDS, self._gate.cut)
        await super().shutdown(sockets)
        timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT and SIGTERM."""
        if self._is_ending:
            self._loop.call_soon_threadsafe(self._gate.cut)
        self._is_ending = self.should_exit = True
