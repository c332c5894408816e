"""What a client is told that cannot have what it asked for, in OpenAI's form."""

from __future__ import annotations

from typing import Any, NoReturn


class Refusal(Exception):  # noqa: N818 (an answer to a client, not a fault of the program)
    """A request that gets an error for an answer.

    Args:
        status: of HTTP.
        message: what came, what was wanted.
        param: the field it is about.
        code: a word for programs.
        retry_after: seconds after which the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients expect it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def refuse_field(name: str, why: str) -> NoReturn:
    """Refuse a request for one of its fields.

    Raises:
        Refusal: always; its message begins with the name.
    """
    raise Refusal(400, f"{name} {why}", param=name)
