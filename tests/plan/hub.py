"""A hub on loopback: what `huggingface_hub` asks for a configuration and safetensors headers."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Repositories are folders; `statuses` gives some a status and an error code instead.

    Attributes:
        num_bytes: sent of files so far.
        garbage: sent instead of the first bytes of a weight file, if any.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.statuses: dict[str, tuple[int, str]] = {}
        self.num_bytes = 0
        self.garbage = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def running(folder: Path) -> Iterator[Hub]:
    hub = Hub(folder)
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        api = re.fullmatch(r"/api/models/(org/\w+)(?:/revision/[^/]+)?", self.path.split("?")[0])
        file = re.fullmatch(r"/(org/\w+)/resolve/[^/]+/([\w.-]+)", self.path.split("?")[0])
        found = api or file
        if found is None or not (self.server.folder / found[1]).is_dir():
            self._send(*self._status(found[1] if found else "", 404, "RepoNotFound"))
        elif found[1] in self.server.statuses:
            self._send(*self.server.statuses[found[1]])
        elif api:
            self._send(200, "", json.dumps({"id": api[1], "sha": COMMIT}).encode(), has_body)
        else:
            self._file(self.server.folder / found[1] / found[2], has_body)

    def _status(self, repo: str, status: int, code: str) -> tuple[int, str]:
        return self.server.statuses.get(repo, (status, code))

    def _file(self, path: Path, has_body: bool) -> None:
        if not path.is_file():
            self._send(404, "EntryNotFound")
            return
        size, asked = path.stat().st_size, self.headers.get("range")
        first, last = 0, size - 1
        if asked:
            first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", asked).groups())  # type: ignore[union-attr]
        with path.open("rb") as source:
            source.seek(first)
            body = source.read(min(last, size - 1) - first + 1) if has_body or size < 1e6 else b""
        if path.suffix == ".safetensors" and self.server.garbage:
            body = self.server.garbage
        more = {
            "Accept-Ranges": "bytes",
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{hashlib.sha1(str(path).encode()).hexdigest()}"',
        }
        if asked:
            more["Content-Range"] = f"bytes {first}-{first + len(body) - 1}/{size}"
        self.server.num_bytes += len(body) * has_body
        self._send(206 if asked else 200, "", body, has_body, more)

    def _send(
        self,
        status: int,
        code: str,
        body: bytes = b"",
        has_body: bool = True,
        more: dict[str, Any] | None = None,
    ) -> None:
        self.send_response(status)
        headers = {"Content-Length": len(body), **({"X-Error-Code": code} if code else {})}
        for name, value in {**headers, **(more or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
