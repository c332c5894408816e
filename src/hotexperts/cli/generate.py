"""What `run` does once it needs torch: load, answer prompts, and measure both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hotexperts.cli.console import quiet_libraries
from hotexperts.cli.opened import Opened
from hotexperts.cli.options import model_label
from hotexperts.cli.report import Data, stats_data
from hotexperts.errors import ConfigError
from hotexperts.integrations.transformers.handle import ExpertCache
from hotexperts.integrations.transformers.pieces import TextPieces
from hotexperts.integrations.transformers.positions import max_positions
from hotexperts.stats import CacheStats, total


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to continue a prompt.

    Attributes:
        max_new_tokens: stop after as many.
        temperature: 0 takes the likeliest token.
        chat: apply the tokenizer's chat template; None does where it has one.
    """

    max_new_tokens: int
    temperature: float
    chat: bool | None


class Session:
    """A cached model that answers prompts; its slots stay warm from one to the next.

    Args:
        opened: the model.
        sampling: how to answer.

    Raises:
        ConfigError: a chat template is asked for and there is none.
    """

    def __init__(self, opened: Opened, sampling: Sampling) -> None:
        self._label = model_label(opened.path)
        has_template = bool(getattr(opened.tokenizer, "chat_template", None))
        if sampling.chat and not has_template:
            raise ConfigError(
                f"{self._label}: the tokenizer has no chat template: leave out --chat"
            )
        self.uses_chat = has_template if sampling.chat is None else sampling.chat
        self._load_seconds = opened.load_seconds
        self._model = opened.model
        self._tokenizer = opened.tokenizer
        self._context = opened.context
        self._sampling = sampling

    @property
    def cache(self) -> ExpertCache:
        """The model's."""
        found: ExpertCache = self._model.expert_cache
        return found

    def answer(self, prompt: str, emit: Callable[[str], None], *, echo: bool = False) -> Data:
        """Continue one prompt.

        Args:
            prompt: the text; earlier prompts are not part of it.
            emit: called with each piece of the answer as it comes.
            echo: call it with the prompt first, once the prompt is accepted.

        Returns:
            The report: text, ids, counters of this answer, seconds and bytes.

        Raises:
            ConfigError: an empty prompt, or more tokens than the context.
        """
        inputs = self._encoded(prompt)
        num_prompt_tokens = inputs["input_ids"].shape[-1]
        pieces = TextPieces(self._tokenizer, emit)
        before = self._counters()
        if echo:
            emit(prompt)
        start = time.perf_counter()
        with quiet_libraries(), torch.no_grad():
            self._model.generate(**inputs, **self._generate_options(), streamer=pieces)
        layers = [now.since(then) for now, then in zip(self._counters(), before, strict=True)]
        return {
            **self._describe(),
            "prompt": prompt,
            "chat": self.uses_chat,
            "num_prompt_tokens": num_prompt_tokens,
            "text": "".join(pieces.pieces),
            "token_ids": pieces.token_ids,
            **self._speed(start, pieces.times),
            "stats": stats_data(total(layers)),
            "layers": [
                {"name": name, **stats_data(stats)}
                for name, stats in zip(self._model.expert_cache.names, layers, strict=True)
            ],
            "memory": self._memory(),
        }

    def check(self, prompt: str) -> None:
        """Before anything is computed.

        Raises:
            ConfigError: an empty prompt, or more tokens than the context.
        """
        self._encoded(prompt)

    def _encoded(self, prompt: str) -> dict[str, Any]:
        with quiet_libraries():  # a prompt that is too long gets our error, not a warning as well
            inputs = self._encode(prompt)
        self._check_length(inputs["input_ids"].shape[-1])
        return inputs

    def _encode(self, prompt: str) -> dict[str, Any]:
        if self.uses_chat:
            inputs = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
            )
        else:
            inputs = self._tokenizer(prompt, return_tensors="pt")
        if inputs["input_ids"].numel() == 0:
            raise ConfigError("the prompt is empty: give at least one token")
        names = ("input_ids", "attention_mask")
        return {name: inputs[name].to(self._model.device) for name in names}

    def _check_length(self, num_prompt_tokens: int) -> None:
        new, context = self._sampling.max_new_tokens, self._context
        if num_prompt_tokens + new > context:
            raise ConfigError(
                f"{num_prompt_tokens} tokens of prompt and {new} new ones are more than the "
                f"context of {context}: {self._remedy(num_prompt_tokens)}"
            )

    def _remedy(self, num_prompt_tokens: int) -> str:
        """What to change for a prompt that is too long, or has too long an answer."""
        most, room = max_positions(self._model.config), self._context - num_prompt_tokens
        remedies = [f"give --max-new-tokens {room} or less"] if room > 0 else []
        if most is None or self._context < most:
            limit = "" if most is None else f", at most {most}"
            remedies.append(f"raise --context{limit}")
        return ", or ".join(remedies) or "it is all the model has: give a shorter prompt"

    def _generate_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "max_new_tokens": self._sampling.max_new_tokens,
            "do_sample": self._sampling.temperature > 0,
            "num_beams": 1,
        }
        if self._sampling.temperature > 0:
            options["temperature"] = self._sampling.temperature
        if self._model.generation_config.pad_token_id is None:
            options["pad_token_id"] = 0  # a batch of one is never padded
        return options

    def _counters(self) -> list[CacheStats]:
        providers = self._model.expert_cache.providers
        return [CacheStats(**provider.stats.as_dict()) for provider in providers]

    def _describe(self) -> Data:
        cache = self._model.expert_cache
        return {
            "model": self._label,
            "model_class": type(self._model).__name__,
            "device": str(self._model.device),
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "cache": {
                "capacity": cache.capacity,
                "num_experts": min(p.store.num_experts for p in cache.providers),
                "num_layers": len(cache.providers),
                "policy": cache.policy,
                "store": cache.store,
                "held": cache.held,
                "store_reason": cache.store_reason,
                "packing": cache.packing,
                "packing_report": cache.packing_report,
                "expert_dtype": cache.expert_dtype,
                "dequantised": cache.dequantised,
                "prefetch": cache.prefetch,
                "relative_errors": cache.relative_errors,
                "mode": cache.mode,
                "mode_reason": cache.mode_reason,
                "reason": cache.reason,
            },
        }

    def _speed(self, start: float, times: list[float]) -> Data:
        decode = times[-1] - times[0]
        return {
            "seconds": {
                "load": self._load_seconds,
                "prefill": times[0] - start,
                "decode": decode,
            },
            "decode_tokens_per_second": (len(times) - 1) / decode if decode > 0 else None,
        }

    def _memory(self) -> Data:
        cache, device = self._model.expert_cache, self._model.device
        tensors = (*self._model.parameters(), *self._model.buffers())
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return {
            "slots_nbytes": cache.slot_nbytes,
            "banks_nbytes": cache.bank_nbytes,
            "lift_nbytes": cache.lift_nbytes,
            "other_nbytes": sum({t.data_ptr(): t.nbytes for t in tensors}.values()),
            "host_nbytes": cache.host_nbytes,
            "expert_nbytes": cache.expert_nbytes,
            "peak_device_nbytes": peak,
        }
