"""The server itself: uvicorn around the gate around Transformers' application."""

from __future__ import annotations

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

    A second signal ends them at once.

    Args:
        served: the model.
        limits: of what clients may do.
        listener: bound, not listening.
        announce: called when requests are answered.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of every request
    config = uvicorn.Config(
        Gate(build_app(served), limits),
        log_level="warning",
        access_log=False,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="on",
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=_HEADER_NBYTES,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    try:
        _Server(config, announce).run([listener])
    finally:
        served.turns.close()


class _Server(uvicorn.Server):
    """Ends without a signal of its own, so that the state can be saved after it."""

    def __init__(self, config: Any, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce
        self._is_ending = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT and SIGTERM."""
        self.force_exit = self._is_ending
        self._is_ending = self.should_exit = True
