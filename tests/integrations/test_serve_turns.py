"""Between Transformers' handlers and `generate`: configurations, and pieces of answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("prometheus_client")

from hotexperts.serve import compat
from hotexperts.serve.call import Call, Sampling
from hotexperts.serve.turns import Streamer, generation_config

pytestmark = pytest.mark.transformers
EOS = 3


class Characters:
    """One id a character; `EOS` is shown unless special tokens are skipped."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(i) for i in ids if i != EOS or not skip_special_tokens)


def streamed(
    ids: list[int], *, parser: Any = None, stop: tuple[str, ...] = (), max_new_tokens: int = 99
) -> tuple[list[Any], Streamer, GenerationConfig]:
    """Items in the queue after these ids were generated, up to a stop text."""
    config = GenerationConfig(eos_token_id=EOS, max_new_tokens=max_new_tokens)

    async def run() -> tuple[list[Any], Streamer]:
        streamer = Streamer(Characters(), parser, config, Call(Sampling(stop=stop)))
        streamer.put(torch.tensor([[7, 7]]))
        for i in ids:
            if not streamer.has_stopped:
                streamer.put(torch.tensor([i]))
        streamer.end()
        await asyncio.sleep(0)
        return [streamer.queue.get_nowait() for _ in range(streamer.queue.qsize())], streamer

    items, streamer = asyncio.run(run())
    assert items.pop() is None
    return items, streamer, config


def codes(text: str) -> list[int]:
    return [ord(character) for character in text]


@pytest.mark.parametrize(
    ("ids", "stop", "expected", "num_tokens", "limit"),
    [
        (codes("abc"), (), "abc", 3, 3),
        ([*codes("ab"), EOS], (), "ab", 3, None),
        (codes("abXc"), ("X",), "ab", 3, None),
        (codes("abc"), ("cX",), "abc", 3, 3),
    ],
    ids=["cut", "ended", "stopped", "held back"],
)
def test_the_limit_stays_only_where_it_cut(
    ids: list[int], stop: tuple[str, ...], expected: str, num_tokens: int, limit: int | None
) -> None:
    """By which the handlers tell `length` from `stop`."""
    items, streamer, config = streamed(ids, stop=stop, max_new_tokens=3)
    assert "".join(items) == expected
    assert streamer.total_tokens == num_tokens
    assert config.max_new_tokens == limit


def test_reasoning_and_calls_of_tools_are_told_apart() -> None:
    from transformers.utils.chat_parsing import ResponseParser

    thought = "reasoning_content" if "reasoning_content" in _reasoning_fields() else "thinking"
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "A:",
        "fields": {
            thought: {"open": "<think>", "close": "</think>", "content": "text"},
            "tool_calls": {
                "open": "<call>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": chr(EOS), "content": "text"},
        },
    }
    text = '<think>hm</think>Yes<call>{"name": "f", "arguments": {"x": 1}}</call>'
    items, _, config = streamed(
        [*codes(text), EOS], parser=ResponseParser(template, prefix="Q: hi A:")
    )
    kinds = {kind: [i for i in items if type(i).__name__ == kind] for kind in ("str", "ToolCall")}
    assert "".join(kinds["str"]) == "Yes"
    assert "".join(i for i in items if type(i).__name__ == "ReasoningText") == "hm"
    assert [(call.name, call.arguments) for call in kinds["ToolCall"]] == [("f", '{"x": 1}')]
    assert config.max_new_tokens is None
    parser = ResponseParser(template, prefix="Q: hi A:")
    stopped, *_ = streamed(codes("<think>hm</think>Yes, no"), parser=parser, stop=(",",))
    assert "".join(i for i in stopped if type(i) is str) == "Yes"
    unfit = ResponseParser(template, prefix="another chat template's prompt")
    assert "".join(streamed(codes("<think>hm"), parser=unfit)[0]) == "<think>hm"


def _reasoning_fields() -> tuple[str, ...]:
    from transformers.utils import chat_template_utils

    return tuple(getattr(chat_template_utils, "_REASONING_FIELDS", ("thinking",)))


def test_a_failure_ends_the_stream_with_what_json_can_hold() -> None:
    async def run() -> Any:
        streamer = Streamer(Characters(), None, GenerationConfig(), Call(Sampling()))
        streamer.fail()
        return await asyncio.wait_for(streamer.queue.get(), 10)

    found = asyncio.run(run())
    assert isinstance(found, compat.names().stream_error)
    assert not set('"\\\n') & set(found.msg)


@pytest.mark.parametrize("do_sample", [True, False])
def test_a_request_decides_and_else_the_model(do_sample: bool) -> None:
    base = GenerationConfig(do_sample=do_sample, temperature=0.5, top_k=40)
    silent = generation_config(base, Sampling(max_tokens=3))
    assert (silent.do_sample, silent.temperature, silent.top_k) == (do_sample, 0.5, 40)
    assert (silent.max_new_tokens, silent.pad_token_id, silent.num_beams) == (3, 0, 1)
    assert not generation_config(base, Sampling(temperature=0, top_p=0.5)).do_sample
    drawn = generation_config(base, Sampling(temperature=1))
    assert (drawn.do_sample, drawn.temperature) == (True, 1.0)
    by_part = generation_config(base, Sampling(top_p=0.9))
    assert (by_part.do_sample, by_part.temperature, by_part.top_p) == (True, 0.5, 0.9)
    assert (base.do_sample, base.max_new_tokens) == (do_sample, None)
