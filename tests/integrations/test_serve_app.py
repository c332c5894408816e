"""Transformers' application around a model that fails, or is not asked at all."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("prometheus_client")

from hotexperts.demo import demo_model_path
from hotexperts.serve.app import Served, build_app
from hotexperts.serve.gate import Gate, Limits
from hotexperts.serve.turns import Turns
from serve.client import Client

pytestmark = pytest.mark.transformers
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TEMPLATE = "{{ raise_exception('only \"users\"') if messages[0].role != 'user' else 'hi' }}"


class Failing:
    """A model whose `generate` raises."""

    device = torch.device("cpu")
    config = SimpleNamespace(model_type="olmoe")
    generation_config = GenerationConfig()
    expert_cache = SimpleNamespace(counters=lambda: {"layer": {"hits": 5}})

    def __init__(self, error: Exception) -> None:
        self.error = error

    def generate(self, **inputs: Any) -> None:
        raise self.error


def answers(
    error: Exception, *requests: tuple[str, dict[str, Any] | None]
) -> list[tuple[int, str]]:
    """Status and text of each answer, in turn."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    tokenizer.chat_template = TEMPLATE
    turns = Turns(64)
    app = build_app(Served("m", Failing(error), tokenizer, turns))
    gate = Gate(app, Limits("m", 1000, 1))

    async def run() -> list[tuple[int, str]]:
        found = []
        for path, body in requests:
            client = Client(gate, path, "GET" if body is None else "POST")
            client.body(b"" if body is None else json.dumps(body).encode())
            status = await client.status()
            parts = [m["body"] for m in client.got if m["type"] == "http.response.body"]
            found.append((status, b"".join(parts).decode()))
        return found

    try:
        return asyncio.run(run())
    finally:
        turns.close()


def test_a_failure_is_told_in_the_answer_and_the_next_one_gets_its_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = {"model": "m", "prompt": "hi"}
    whole, stream, chat, health = answers(
        ZeroDivisionError("not for clients"),
        ("/v1/completions", plain),
        ("/v1/completions", plain | {"stream": True}),
        ("/v1/chat/completions", CHAT),
        ("/health", None),
    )
    for status, text in (whole, chat):
        error = json.loads(text)["error"]
        assert (status, error["type"]) == (500, "server_error")
        assert error["message"] == "the server failed to generate: its log says why"
    assert stream[0] == 200
    assert json.loads(stream[1].removeprefix("data: ")) == {"error": error["message"]}
    assert health == (200, '{"status":"ok"}')
    assert "not for clients" in caplog.text


def test_a_gpu_that_failed_makes_the_server_unhealthy() -> None:
    first, health = answers(
        torch.AcceleratorError("CUDA error: an illegal memory access"),
        ("/v1/completions", {"model": "m", "prompt": "hi"}),
        ("/health", None),
    )
    assert first[0] == 500
    assert (health[0], json.loads(health[1])["status"]) == (503, "unhealthy")


def test_what_the_template_does_not_take_is_the_client_s_fault() -> None:
    system = {"messages": [{"role": "system", "content": "x"}]}
    found = answers(
        ZeroDivisionError(),
        ("/v1/chat/completions", CHAT | system),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"tokenize": False}}),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"messages": "x"}}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "x" * 2000}]}),
        ("/metrics", None),
    )
    messages = [json.loads(text)["error"]["message"] for status, text in found[:4]]
    assert [status for status, _ in found] == [400, 400, 400, 413, 200]
    assert messages[0] == (
        'the chat template does not take these messages (only "users"): send roles in an order '
        "that it takes"
    )
    assert messages[1:3] == [
        "tokenize is not the template's: leave it out",
        "messages is not the template's: leave it out",
    ]
    assert 'hotexperts_hits_total{rank="0"} 5.0' in found[4][1]
