"""Timed prefills and decode steps of one engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from hotexperts.bench.decode import Taken
from hotexperts.bench.vllm.engine import Engine
from hotexperts.bench.vllm.model import synchronize
from hotexperts.bench.vllm.replay import SequenceReplay
from hotexperts.stats import CacheStats

Likeliest = list[tuple[list[int], list[float]]]  # tokens of each row, their log probabilities


class Decoder:
    """Decodes batches of sequences greedily; every step of the engine is timed on its own.

    Args:
        engine: without asynchronous scheduling, with room for a batch's prompts in one step.
        replay: of its routers.
    """

    def __init__(self, engine: Engine, replay: SequenceReplay) -> None:
        self.engine = engine
        self._replay = replay
        self._num_requests = 0

    def sequence(self, rows: Sequence[int], prompt_tokens: int, num_steps: int) -> Taken:
        """One batch of sequences, from an empty KV cache on.

        Args:
            rows: which sequences the routers repeat.
            prompt_tokens: of each.
            num_steps: of decode after them.
        """
        self._add(rows, prompt_tokens, num_steps + 1, None)
        self.engine.reset_stats()
        prefill_ms, _ = self._step()
        prefill = self._counted()
        steps = [self._step() for _ in range(num_steps)]
        decode = self._counted()
        assert not self.engine.llm.llm_engine.has_unfinished_requests()
        last = [output.outputs[0].token_ids[-1] for output in sorted(steps[-1][1], key=_number)]
        return Taken(prefill_ms, [ms for ms, _ in steps], prefill, decode, last)

    def likeliest(self, rows: Sequence[int], prompt_tokens: int, num_tokens: int) -> Likeliest:
        """The greedy tokens of each row, and their log probabilities."""
        self._add(rows, prompt_tokens, num_tokens, 0)
        outputs: dict[int, Any] = {}
        while self.engine.llm.llm_engine.has_unfinished_requests():
            outputs |= {_number(output): output.outputs[0] for output in self._step()[1]}
        found = [outputs[number] for number in sorted(outputs)]
        return [
            (
                list(one.token_ids),
                [at[token].logprob for token, at in zip(one.token_ids, one.logprobs, strict=True)],
            )
            for one in found
        ]

    def _add(
        self, rows: Sequence[int], num_prompt: int, num_tokens: int, logprobs: int | None
    ) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
        )
        self._replay.begin(rows)
        for row in rows:
            prompt = {"prompt_token_ids": [(7 * row + 3 * i) % 200 + 5 for i in range(num_prompt)]}
            self.engine.llm.llm_engine.add_request(str(self._num_requests), prompt, params)
            self._num_requests += 1

    def _step(self) -> tuple[float, list[Any]]:
        """Milliseconds until all of it is done, and what it gave."""
        synchronize()
        start = time.perf_counter()
        outputs = self.engine.llm.llm_engine.step()
        synchronize()
        return 1e3 * (time.perf_counter() - start), outputs

    def _counted(self) -> CacheStats:
        """Counters since the last call."""
        if not self.engine.has_slots:
            return CacheStats()
        found = self.engine.sums()
        self.engine.reset_stats()
        names = {field.name for field in fields(CacheStats)}
        return CacheStats(**{name: value for name, value in found.items() if name in names})


def _number(output: Any) -> int:
    return int(output.request_id)


def verified(found: Likeliest, expected: Likeliest, tolerance: float) -> dict[str, Any]:
    """Whether the resident model's log probabilities are found.

    Two tokens may be nearly as likely: where another one is the likeliest, its log probability is
    compared all the same, and nothing after it, which is of another text. Where nothing may
    differ, no token may.

    Args:
        found: of a cache.
        expected: of the resident model; nothing leaves open what is right.
        tolerance: that a log probability may be off by.
    """
    if not expected:
        return {"verified": None, "first_difference": None}
    first, largest = None, 0.0
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for at, (token, value, other, wanted) in enumerate(zip(*ours, *theirs, strict=True)):
            largest = max(largest, abs(value - wanted))
            is_other = token != other
            if first is None and (abs(value - wanted) > tolerance or (is_other and not tolerance)):
                where = f"row {row}: a log probability of {value:.4g} instead of {wanted:.4g}"
                first = {"position": at, "where": where}
            if is_other:
                break
    return {
        "verified": first is None,
        "first_difference": first,
        "largest_difference": largest,
    }
