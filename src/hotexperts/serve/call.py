"""One request on its way: what it wants, and whether anybody still waits for the answer."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to answer.

    Attributes:
        max_tokens: new ones, as asked for.
        default_tokens: where none are asked for; None is what the context leaves.
        temperature: 0 takes the likeliest token; None is as the model's own configuration says.
        top_p: part of the probability to draw from; None likewise.
        seed: of the draws; None draws anew each time.
        stop: texts that end the answer and are not part of it.
    """

    max_tokens: int | None = None
    default_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """A request being answered.

    Attributes:
        sampling: how to answer.
        is_gone: set when nobody waits any more.
    """

    sampling: Sampling
    is_gone: threading.Event = field(default_factory=threading.Event)


CURRENT: ContextVar[Call] = ContextVar("hotexperts_call")  # Transformers' handlers have no place
