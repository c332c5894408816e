"""`hotexperts run`: continue a prompt, or answer a loop of them, and report what the cache did."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hotexperts.cli import console, groups, options, report
from hotexperts.cli.expert_options import EXPERTS, ExpertOptions
from hotexperts.cli.state import kept
from hotexperts.config import LOWEST_TEMPERATURE, parse_cache_size
from hotexperts.errors import ConfigError, HotExpertsError
from hotexperts.policy import DEFAULT_POLICY

if TYPE_CHECKING:
    from hotexperts.cli.generate import Session

_LEAVE = ("exit", "quit")


@groups.expanded
def run(
    model: options.Model = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text to continue; '-' reads stdin.", show_default=False),
    ] = None,
    interactive: Annotated[
        bool,
        typer.Option(
            "--interactive",
            help="Ask for prompts, each answered on its own with a warm cache, until 'exit', "
            "the end of input or Ctrl-C.",
        ),
    ] = False,
    expert_cache_size: options.CacheSize = None,
    expert_cache_gib: options.CacheGib = None,
    policy: options.Policy = DEFAULT_POLICY,
    max_new_tokens: options.MaxNewTokens = 128,
    device: options.Device = None,
    expert_options: ExpertOptions = EXPERTS,
    dtype: options.WeightsDtype = options.Dtype.AUTO,
    expert_cache_state: options.CacheState = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            help="Serve the cache's counters to Prometheus on this machine; 0 takes a free port.",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 always takes the likeliest token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws, with a temperature.")] = 0,
    context: options.Context = None,
    chat: options.Chat = None,
    trust_remote_code: options.TrustRemoteCode = False,
    no_host_memory_check: options.NoHostMemoryCheck = False,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Generate text with a cached model, and report hits, bytes, speed and memory.

    The text comes on stdout as it is generated, the report after it.

    Checkpoints are safetensors or GGUF: pickle files are never read.
    """
    with console.errors_as_one_line(debug):
        size = options.cache_size(expert_cache_size, expert_cache_gib)
        if expert_cache_state is not None:
            options.check_output("--expert-cache-state", str(expert_cache_state))
        _check_prompt(prompt, interactive, as_json)
        parse_cache_size(size)
        load_options = expert_options.for_load(
            device=device,
            dtype=dtype,
            policy=policy,
            no_host_memory_check=no_host_memory_check,
        )
        _check_draws(temperature, seed)
        path = options.model_path(model)

        import torch

        from hotexperts.cli.generate import Sampling, Session
        from hotexperts.cli.opened import open_model

        opened = open_model(
            path,
            context=context,
            trust_remote_code=trust_remote_code,
            expert_cache_size=size,
            **load_options,
        )
        torch.manual_seed(seed)
        session = Session(opened, Sampling(max_new_tokens, temperature, chat))
        with _served(session, metrics_port), kept(session.cache, expert_cache_state):
            if interactive:
                _loop(session)
            else:
                _once(session, options.stdin_text() if prompt == "-" else prompt or "", as_json)


@contextmanager
def _served(session: Session, port: int | None) -> Iterator[None]:
    """Inside, Prometheus may ask."""
    if port is None:
        yield
        return
    server = session.cache.serve_metrics(port)
    console.note(f"counters at {server.url}")
    try:
        yield
    finally:
        server.close()


def _check_prompt(prompt: str | None, interactive: bool, as_json: bool) -> None:
    """Refuse what can be refused before torch is imported."""
    if prompt is None and not interactive:
        raise ConfigError("give --prompt TEXT or --interactive")
    if prompt is not None and interactive:
        raise ConfigError("give --prompt TEXT or --interactive, not both")
    if interactive and sys.stdin is None:
        raise ConfigError("--interactive asks on stdin, which is closed: give --prompt TEXT")
    if interactive and as_json:
        raise ConfigError("--json prints one object: use it with --prompt")
    options.check_text(prompt or "", "--prompt")


def _check_draws(temperature: float, seed: int) -> None:
    if not math.isfinite(temperature) or 0 < temperature < LOWEST_TEMPERATURE:
        raise ConfigError(
            f"--temperature is {temperature:g}: give 0 for the likeliest token, or at least "
            f"{LOWEST_TEMPERATURE:g}"
        )
    if not -(2**63) <= seed < 2**64:
        raise ConfigError("--seed does not fit 64 bits: give a smaller one")


def _once(session: Session, prompt: str, as_json: bool) -> None:
    if as_json:
        with console.prints_to_stderr():
            data = session.answer(prompt, emit=lambda text: None)
        console.show_json(data)
        return
    with console.streaming() as emit:
        data = session.answer(prompt, emit=emit, echo=not session.uses_chat)
    typer.echo()
    console.show(report.run_report(data))


def _loop(session: Session) -> None:
    terminal = Console(stderr=True)
    while True:
        try:
            prompt = options.check_text(terminal.input("> "), "the prompt")
            if prompt.strip() in _LEAVE:
                return
            if prompt.strip():
                with console.streaming() as emit:
                    data = session.answer(prompt, emit=emit)
                typer.echo("\n" + report.run_line(data))
        except HotExpertsError as error:
            console.show_error(error)
        except (EOFError, KeyboardInterrupt):
            typer.echo(err=True)
            return
