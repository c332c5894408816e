"""The routing of a served model, written in the project's own format (docs/traces.md)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hotexperts.errors import UnsupportedModelError
from hotexperts.integrations.vllm.options import flag
from hotexperts.simulate.trace import TraceError
from hotexperts.simulate.writer import TraceWriter

SAVE_SECONDS = 30.0  # from one writing of the file to the next
SAVE_SHARE = 0.05  # of the time, at most, that goes into writing
log = logging.getLogger("vllm.hotexperts")


class Recorder:
    """Keeps what each layer's router says in one step, and writes what a step computed for tokens.

    Layers copy their ids into a buffer that never moves, inside CUDA graphs too. After a step its
    rows start on their way to the host, and are appended in a later one when they have arrived.
    After the first step, and then every half minute, a thread writes the file anew: nobody tells a
    process that is killed.

    Args:
        path: of the file.
        num_layers: with experts, of this process.
        max_tokens: rows of the largest step.
        config: vLLM's `VllmConfig`.
    """

    def __init__(self, path: Path, num_layers: int, max_tokens: int, config: Any) -> None:
        self._path = path
        self._shape = num_layers, max_tokens
        self._meta: dict[str, Any] = {
            "model": str(config.model_config.model),
            "source": "vLLM",
            "layers": [],
        }
        self._buffer: Any = None
        self._num_experts = 0
        self._writer: TraceWriter | None = None
        self._is_ended = False
        self._tokens = Tokens()
        self._saving: threading.Thread | None = None
        self._due = 0.0
        self._on_their_way: deque[tuple[torch.cuda.Event | None, torch.Tensor, Any]] = deque()

    def rows_of(self, layer: Any, expert_nbytes: int, device: torch.device) -> Any:
        """Where the next layer copies its ids, int32 `[max_tokens, K]`; None of a draft model's.

        Args:
            layer: vLLM's `RoutedExperts`.
            expert_nbytes: of one expert in this process.
            device: of the ids.

        Raises:
            UnsupportedModelError: it routes to another number of experts than the first one.
        """
        if self._buffer is None:
            num_layers, max_tokens = self._shape
            self._buffer = torch.full(
                (num_layers, max_tokens, layer.top_k), -1, dtype=torch.int32, device=device
            )
            self._meta["expert_nbytes"] = expert_nbytes
        if len(self._meta["layers"]) == len(self._buffer):
            return None  # made when this model's layers had been loaded
        if layer.top_k != self._buffer.shape[2]:
            raise UnsupportedModelError(
                f"{layer.layer_name} has {layer.top_k} experts a token, the first layer "
                f"{self._buffer.shape[2]}: leave trace out of {flag('options')}"
            )
        self._num_experts = max(self._num_experts, layer.global_num_experts)
        self._meta["layers"].append(layer.layer_name)
        return self._buffer[len(self._meta["layers"]) - 1]

    def after_step(self, step: Any, runner: Any) -> None:
        """Take what the layers kept.

        Args:
            step: vLLM's `SchedulerOutput`.
            runner: vLLM's model runner, which has executed it.
        """
        labels = self._tokens.of(step, runner)
        if self._is_ended or self._buffer is None or labels is None:
            return
        rows = self._buffer[:, : len(labels[0])].contiguous()
        event = None
        if rows.is_cuda:
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            event, rows = torch.cuda.Event(), host
            event.record()
        elif rows.data_ptr() == self._buffer.data_ptr():
            rows = rows.clone()
        self._on_their_way.append((event, rows, labels))
        while self._on_their_way and (
            self._on_their_way[0][0] is None or self._on_their_way[0][0].query()
        ):
            self._append()
        self._save_when_due()

    def end(self) -> str | None:
        """Write what is left and close the file; its name, or None where nothing was recorded."""
        while self._on_their_way:
            if (event := self._on_their_way[0][0]) is not None:
                event.synchronize()
            self._append()
        self._is_ended = True
        if self._saving is not None:
            self._saving.join()
        if self._writer is None:
            return None
        try:
            self._writer.close()
        except TraceError:
            log.exception("expert cache: the trace is lost")
            return None
        return str(self._path)

    def _append(self) -> None:
        _, rows, (phase, seq) = self._on_their_way.popleft()
        if self._is_ended:
            return
        try:
            if self._writer is None:
                self._writer = TraceWriter(self._path, self._num_experts, self._meta)
            self._writer.append(rows.transpose(0, 1).numpy(), phase, seq)
        except TraceError as error:  # answers matter more
            log.warning("expert cache: the trace ends here: %s", error)
            self._is_ended = True

    def _save_when_due(self) -> None:
        if self._writer is None or (self._saving is not None and self._saving.is_alive()):
            return
        if time.monotonic() >= self._due:
            # A daemon, as `end` waits for it, and an end without `end` has no time to wait.
            self._saving = threading.Thread(target=self._save, args=(self._writer,), daemon=True)
            self._saving.start()

    def _save(self, writer: TraceWriter) -> None:
        start = time.monotonic()
        try:
            writer.save()
        except TraceError as error:
            log.warning("expert cache: the trace so far is not saved, later again: %s", error)
        seconds = time.monotonic() - start
        self._due = start + max(SAVE_SECONDS, seconds / SAVE_SHARE)


class Tokens:
    """Which tokens a step computes, in the order of its rows."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[int, int]] = {}  # sequence number, tokens of the prompt
        self._num_sequences = 0

    def of(self, step: Any, runner: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        """Phase and sequence number of each token; None of a step without tokens."""
        start = self._starts(step)
        if not step.total_num_scheduled_tokens:
            return None
        phases, seqs = [], []
        for name in row_order(step, runner):
            seq, num_prompt = self._requests[name]
            positions = start[name] + np.arange(step.num_scheduled_tokens[name])
            phases.append(positions >= num_prompt)
            seqs.append(np.full(len(positions), seq))
        return np.concatenate(phases).astype(np.int64), np.concatenate(seqs)

    def _starts(self, step: Any) -> dict[str, int]:
        """Tokens of each request that earlier steps have computed; forgets finished requests."""
        for name in step.finished_req_ids:
            self._requests.pop(name, None)
        for new in step.scheduled_new_reqs:
            if new.req_id not in self._requests:  # one that was preempted comes again
                prompt = new.prompt_token_ids
                num_prompt = len(new.prompt_embeds if prompt is None else prompt)
                self._requests[new.req_id] = self._num_sequences, num_prompt
                self._num_sequences += 1
        cached = step.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return starts | {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}


def row_order(step: Any, runner: Any) -> list[str]:
    """Names of a step's requests in the order of their rows.

    vLLM's second model runner has them in what it keeps for sampling, the first one in the batch
    that it carries along.
    """
    state = getattr(runner, "execute_model_state", None)
    batch = getattr(state, "input_batch", None) or getattr(runner, "input_batch", None)
    names = list(getattr(batch, "req_ids", ()))
    if sorted(names) != sorted(step.num_scheduled_tokens):
        raise UnsupportedModelError(
            "this vLLM does not say in which order its requests run: leave trace out of "
            f"{flag('options')}"
        )
    return names


def recorder_for(caches: Any) -> Recorder | None:
    """One for a model's caches, if its trace is wanted; a draft model is not recorded."""
    if caches.options.trace is None or caches.is_draft:
        return None
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = trace_path(caches.options.trace, caches.config.parallel_config, rank)
    most = caches.config.scheduler_config.max_num_batched_tokens
    return Recorder(path, caches.num_expected, most, caches.config)


def trace_path(name: str, parallel: Any, rank: int) -> Path:
    """The file of one rank."""
    path = Path(name)
    return path if parallel.world_size == 1 else path.with_suffix(f".rank{rank}{path.suffix}")
