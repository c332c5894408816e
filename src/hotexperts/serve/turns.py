"""Answers, one after another in one thread: what Transformers' handlers call to generate.

Every step of a model changes its slots, so that two answers cannot be generated at the same time.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from hotexperts.integrations.transformers.pieces import TextPieces
from hotexperts.serve import compat
from hotexperts.serve.call import CURRENT, Call, Sampling
from hotexperts.serve.refusal import Refusal
from hotexperts.serve.stops import StopFilter

_log = logging.getLogger(__name__)
_FAILED = "the server failed to generate: its log says why"  # no quotes: it is put into JSON as is


def generation_config(base: Any, sampling: Sampling) -> Any:
    """The model's configuration, with what a request wants."""
    config = copy.deepcopy(base)
    config.num_beams = config.num_return_sequences = 1
    config.max_new_tokens = sampling.max_tokens
    if config.pad_token_id is None:
        config.pad_token_id = 0  # a batch of one is never padded
    if sampling.temperature == 0:
        config.do_sample = False
        return config
    if sampling.temperature is not None or sampling.top_p is not None:
        config.do_sample = True
    if sampling.temperature is not None:
        config.temperature = float(sampling.temperature)
    if sampling.top_p is not None:
        config.top_p = float(sampling.top_p)
    return config


class Turns:
    """The queue of answers.

    Args:
        context: tokens of prompt and answer together.

    Attributes:
        is_broken: the GPU has failed, and no more answers come from this process.
    """

    def __init__(self, context: int) -> None:
        self.is_broken = False
        self._context = context
        self._thread = ThreadPoolExecutor(1, "answers")

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], Streamer]:
        """Queue one answer.

        Args:
            model: generates.
            processor: the tokenizer.
            inputs: the encoded prompt.
            gen_config: from `generation_config`; how many tokens are left for the answer is added.
            request_id: the client's.
            response_parser: splits the answer into text, reasoning and calls of tools.

        Returns:
            Where the pieces come, None after the last; and what puts them there.

        Raises:
            Refusal: the prompt is empty, or does not fit with its answer.
        """
        call = CURRENT.get()
        gen_config.max_new_tokens = self._num_new(inputs["input_ids"].shape[-1], call.sampling)
        streamer = Streamer(processor, response_parser, gen_config, call)
        encoded = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        self._thread.submit(self._generate, model, encoded, gen_config, streamer, call)
        return streamer.queue, streamer

    def close(self) -> None:
        """Wait for the answer that is being generated; drop the others."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _num_new(self, num_prompt: int, sampling: Sampling) -> int:
        if num_prompt == 0:
            raise Refusal(400, "the prompt is empty: give at least one token", param="prompt")
        room = self._context - num_prompt
        asked = sampling.max_tokens
        if room < (asked or 1):
            raise Refusal(
                400,
                f"{num_prompt} tokens of prompt and {asked or 1} new ones are more than the "
                f"context of {self._context}: give a shorter prompt, or ask for fewer new ones",
                code="context_length_exceeded",
            )
        return asked or min(room, sampling.default_tokens or room)

    def _generate(
        self, model: Any, encoded: dict[str, Any], config: Any, streamer: Streamer, call: Call
    ) -> None:
        """In the thread: one answer, to its end or until nobody waits for it."""
        if call.is_gone.is_set():
            return
        try:
            if call.sampling.seed is None:
                torch.seed()
            else:
                torch.manual_seed(call.sampling.seed)
            criteria = StoppingCriteriaList([_Ended(streamer, call)])
            model.generate(
                **encoded, generation_config=config, streamer=streamer, stopping_criteria=criteria
            )
        except Exception as error:  # the client waits, and the next one wants its turn
            _log.exception("an answer failed")
            self.is_broken |= isinstance(error, torch.AcceleratorError)
            streamer.fail()


def _fitting(parser: Any) -> Any:
    """None for a parser that does not find where the answer begins: it takes the prompt for it.

    Transformers chooses by the model's type, and the chat template may be another.
    """
    begin = [] if parser is None else compat.names().events_to_chunks(parser.initial_events)
    return None if any(type(item) is str for item in begin) else parser


class _Ended(StoppingCriteria):
    """Stops at a stop text, or when the client is gone."""

    def __init__(self, streamer: Streamer, call: Call) -> None:
        self._streamer = streamer
        self._call = call

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        is_over = self._streamer.has_stopped or self._call.is_gone.is_set()
        return torch.full((input_ids.shape[0],), is_over, device=input_ids.device)


class Streamer:
    """Token ids in, in the thread; text out, in the event loop's queue.

    Args:
        tokenizer: decodes.
        parser: splits the text into kinds; None, or one that does not fit, leaves it whole.
        config: its `max_new_tokens` becomes None where the answer ends by itself, by which
            Transformers' handlers tell "stop" from "length".
        call: whose stop texts end it, and which `cancel` ends.

    Attributes:
        queue: pieces of the answer, as the handlers expect them.
    """

    def __init__(self, tokenizer: Any, parser: Any, config: Any, call: Call) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        parser = _fitting(parser)
        self._parser = parser
        self._config = config
        self._call = call
        self._stops = StopFilter(call.sampling.stop)
        self._pieces = TextPieces(tokenizer, self._feed, skip_special_tokens=parser is None)
        if parser is not None:
            self._post(*compat.names().events_to_chunks(parser.initial_events))

    @property
    def total_tokens(self) -> int:
        """New ones so far."""
        return len(self._pieces.token_ids)

    @property
    def has_stopped(self) -> bool:
        """Whether a stop text came."""
        return self._stops.found

    def put(self, ids: torch.Tensor) -> None:
        """Take the prompt at first, then the ids of each step."""
        self._pieces.put(ids)

    def end(self) -> None:
        """Emit what was held back, and the end."""
        self._pieces.end()
        self._show(self._stops.flush())
        if self._parser is not None:
            self._post(*self._last_events())
        if self.has_stopped or self._is_at_end():
            self._config.max_new_tokens = None
        self._post(None)

    def cancel(self) -> None:
        """Nobody waits for the rest."""
        self._call.is_gone.set()

    def fail(self) -> None:
        """End with an error."""
        self._post(compat.names().stream_error(_FAILED))

    def _is_at_end(self) -> bool:
        ends = self._config.eos_token_id
        ids = ends if isinstance(ends, list) else [ends]
        return self._pieces.token_ids[-1:] != [] and self._pieces.token_ids[-1] in ids

    def _last_events(self) -> list[Any]:
        try:
            _, events = self._parser.finalize()
        except (ValueError, RuntimeError):  # the answer ended inside a call of a tool
            return []
        return compat.names().events_to_chunks(events)

    def _feed(self, text: str) -> None:
        self._show(self._stops.feed(text))

    def _show(self, text: str) -> None:
        if not text:
            return
        if self._parser is None:
            self._post(text)
        else:
            self._post(*compat.names().events_to_chunks(self._parser.feed(text)))

    def _post(self, *items: Any) -> None:
        for item in items:
            if not self._loop.is_closed():  # else the server has ended, and nobody waits
                self._loop.call_soon_threadsafe(self.queue.put_nowait, item)
