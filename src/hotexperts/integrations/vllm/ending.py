"""How state and trace outlive a server: saved as it ends, with time for it, and before that."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger("vllm.hotexperts")

GRACE_SECONDS = 20.0  # at most, for what takes a fraction of a second unless a trace is long
MOST_STEPS = 1024  # between two saves of a state
_is_wanted = False


def wait_for_engines() -> None:
    """Let the engines of this process's server save as they end: vLLM would kill them at once."""
    global _is_wanted
    _is_wanted = True


def patch_processes(module: Any) -> None:
    """Have `vllm.v1.engine.utils` wait for engine processes that have something to save.

    `vllm serve` asks them to end and kills them in the same moment, unless it has a
    `--shutdown-timeout`.
    """
    cls = module.CoreEngineProcManager
    stop = cls.shutdown

    @functools.wraps(stop)
    def shutdown(self: Any, timeout: float | None = None) -> None:
        stop(self, max(timeout or 0.0, GRACE_SECONDS) if _is_wanted else timeout)

    cls.shutdown = shutdown


def patch_loops(module: Any) -> None:
    """Save where an engine's loop ends in `vllm.v1.engine.core`.

    After it the process falls to the next signal: after Ctrl-C there is one, its server's.
    """
    for name in ("EngineCoreProc", "DPEngineCoreProc"):
        cls = getattr(module, name)
        cls.run_busy_loop = _saving_after(cls.run_busy_loop)


def _saving_after(loop: Callable[[Any], None]) -> Callable[[Any], None]:
    from hotexperts.integrations.vllm.hooks import models

    @functools.wraps(loop)
    def run_busy_loop(self: Any) -> None:
        try:
            loop(self)
        finally:
            save_all(models())

    return run_busy_loop


def save_all(models: Iterable[Any]) -> None:
    """What an end saves: of each model its state and its trace. A second time does no harm.

    What goes wrong is logged and no more: the next start is a cold one, this end goes on.
    """
    from hotexperts.integrations.vllm.state_file import save_state

    for caches in models:
        try:
            save_state(caches)
        except Exception:
            log.exception("expert cache: the state could not be saved")
        caches.has_started = False  # what comes now is no request
        try:
            if caches.recorder is not None:
                caches.recorder.end()
        except Exception:  # a GPU that failed fails here again
            log.exception("expert cache: the end of the trace could not be saved")


def is_due(num_steps: int) -> bool:
    """Whether to save the state after so many steps: often at first, then every 1024 of them.

    By steps, not by time, so that all ranks save the same.
    """
    return num_steps % min(MOST_STEPS, 1 << (num_steps.bit_length() - 1)) == 0
