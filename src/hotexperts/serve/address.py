"""Where a server listens, and who may come without a key: this machine alone."""

from __future__ import annotations

import ipaddress
import re
import socket

from hotexperts.errors import ConfigError

_KEY = re.compile(r"[!-~]{1,512}")
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def check_access(host: str, api_key: str | None) -> None:
    """Refuse to be reached from other machines without a key.

    Raises:
        ConfigError: no such host, one beyond this machine without a key, or a key that no header
            can carry.
    """
    if api_key is not None and not _KEY.fullmatch(api_key):
        raise ConfigError("--api-key: give 1 to 512 visible ASCII characters without spaces")
    if api_key is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines: give --api-key KEY (or the "
            "environment variable HOTEXPERTS_API_KEY), or leave out --host"
        )


def is_loopback(host: str) -> bool:
    """Whether every address of the host is this machine's own.

    Raises:
        ConfigError: it has none.
    """
    return all(ipaddress.ip_address(address[0]).is_loopback for _, address in _resolve(host))


def local_names(host: str) -> frozenset[str] | None:
    """What browsers may call a server that only this machine reaches; None for other servers."""
    return _LOCAL_NAMES | {_in_url(host).lower()} if is_loopback(host) else None


def reserve(host: str, port: int) -> socket.socket:
    """A socket that has the address, and does not listen yet: the model loads first.

    Raises:
        ConfigError: the address cannot be had.
    """
    family, address = _resolve(host)[0]
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((address[0], port, *address[2:]))
    except OSError as error:
        found.close()
        raise ConfigError(
            f"cannot listen at {_in_url(host)}:{port} ({error.strerror}): give another --port or "
            "--host"
        ) from error
    return found


def url(host: str, port: int) -> str:
    """How clients reach it."""
    return f"http://{_in_url(host)}:{port}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _resolve(host: str) -> list[tuple[socket.AddressFamily, tuple[str, ...]]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--host {host}: no such address ({error}): give one of this machine"
        ) from error
    return [(family, address) for family, _, _, _, address in found]  # type: ignore[misc]
