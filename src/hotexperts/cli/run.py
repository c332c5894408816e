"""`hotexperts run`: continue a prompt, or answer a loop of them, and report what the cache did."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hotexperts.cli import console, options, report
from hotexperts.config import parse_cache_size
from hotexperts.errors import ConfigError, HotExpertsError
from hotexperts.policy import DEFAULT_POLICY, POLICIES

if TYPE_CHECKING:
    from hotexperts.cli.generate import Sampling, Session

_LEAVE = ("exit", "quit")


def run(
    model: options.Model = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What to continue; '-' reads stdin.", show_default=False),
    ] = None,
    interactive: Annotated[
        bool,
        typer.Option(
            "--interactive",
            help="Ask for prompts, each answered on its own with a warm cache, until 'exit', "
            "the end of input or Ctrl-C.",
        ),
    ] = False,
    expert_cache_size: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto|SIZE",
            help="Slots a layer; 'auto' fills the free memory; a size such as 6GiB is a budget "
            "for the whole model.  [default: auto]",
            show_default=False,
        ),
    ] = None,
    expert_cache_gib: Annotated[
        float | None,
        typer.Option(
            metavar="G",
            help="GPU budget in GiB for the whole model (the same as --expert-cache-size GGiB).",
            show_default=False,
        ),
    ] = None,
    policy: options.Policy = DEFAULT_POLICY,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after as many.")] = 128,
    device: options.Device = None,
    expert_store: options.ExpertStore = options.Store.RAM,
    dtype: options.WeightsDtype = options.Dtype.AUTO,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 always takes the likeliest token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the random numbers, with a temperature.")] = 0,
    context: Annotated[
        int,
        typer.Option(
            min=1, help="Tokens of prompt and answer together; a budget leaves room for them."
        ),
    ] = 4096,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Apply the chat template; where the tokenizer has one by default.",
            show_default=False,
        ),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    no_host_memory_check: options.NoHostMemoryCheck = False,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Generate text with a cached model, and report hits, bytes, speed and memory.

    The text comes on stdout as it is generated, the report after it.

    Checkpoints must be safetensors: pickle files are never read.
    """
    with console.errors_as_one_line(debug):
        size = options.cache_size(expert_cache_size, expert_cache_gib)
        _check(prompt, interactive, as_json, size, policy)
        path = options.model_path(model)

        from hotexperts.cli.generate import Sampling

        session = _open(
            path,
            Sampling(max_new_tokens, temperature, chat, context),
            seed=seed,
            trust_remote_code=trust_remote_code,
            expert_cache_size=size,
            policy=policy,
            expert_store=expert_store.value,
            device=device,
            dtype=dtype.value,
            kv_tokens=context,
            check_host_memory=not no_host_memory_check,
        )
        if interactive:
            _loop(session)
        else:
            _once(session, sys.stdin.read() if prompt == "-" else prompt or "", as_json)


def _check(prompt: str | None, interactive: bool, as_json: bool, size: str, policy: str) -> None:
    """Refuse what can be refused before torch is imported."""
    if (prompt is None) == (not interactive):
        raise ConfigError("give one of --prompt TEXT and --interactive")
    if interactive and as_json:
        raise ConfigError("--json prints one object: use it with --prompt")
    parse_cache_size(size)
    POLICIES.load(policy)


def _open(
    path: str,
    sampling: Sampling,
    *,
    seed: int,
    trust_remote_code: bool,
    **load_options: Any,
) -> Session:
    import torch

    from hotexperts.cli.generate import Session
    from hotexperts.cli.text import load_tokenizer
    from hotexperts.transformers import load

    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    start = time.perf_counter()
    with console.loading("loading experts") as progress:
        model = load(path, trust_remote_code=trust_remote_code, progress=progress, **load_options)
    torch.manual_seed(seed)
    return Session(path, time.perf_counter() - start, model, tokenizer, sampling)


def _once(session: Session, prompt: str, as_json: bool) -> None:
    if as_json:
        with console.prints_to_stderr():
            data = session.answer(prompt, emit=lambda text: None)
        console.show_json(data)
        return
    data = session.answer(prompt, emit=_echo, echo=not session.uses_chat)
    typer.echo()
    console.show(report.run_report(data))


def _loop(session: Session) -> None:
    terminal = Console(stderr=True)
    while True:
        try:
            prompt = terminal.input("> ")
            if prompt.strip() in _LEAVE:
                return
            if prompt.strip():
                data = session.answer(prompt, emit=_echo)
                typer.echo("\n" + report.run_line(data))
        except HotExpertsError as error:
            console.show_error(error)
        except (EOFError, KeyboardInterrupt):
            typer.echo(err=True)
            return


def _echo(text: str) -> None:
    typer.echo(text, nl=False)
