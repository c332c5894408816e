"""`hotexperts serve`: an OpenAI-compatible server, vLLM's or Transformers' own."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from hotexperts.cli import console, options
from hotexperts.cli.state import kept
from hotexperts.config import AUTO, DEFAULT_KV_TOKENS, parse_bytes, parse_cache_size
from hotexperts.errors import ConfigError
from hotexperts.policy import DEFAULT_POLICY, POLICIES
from hotexperts.serve import address, vllm
from hotexperts.serve.engine import Engine, choose
from hotexperts.serve.gate import Limits

if TYPE_CHECKING:
    from hotexperts.serve.app import Served

DEMO_NAME = "hotexperts-demo"
DEFAULT_BODY = "1MiB"
DEFAULT_REQUESTS = 16
_PASSED = "vllm arguments"  # in the context's meta


class Command(TyperCommand):
    """Keeps what comes after `--` for vLLM."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split there; the rest is ours."""
        if "--" in args:
            place = args.index("--")
            args, ctx.meta[_PASSED] = args[:place], args[place + 1 :]
        return super().parse_args(ctx, args)


def serve(
    ctx: typer.Context,
    model: options.Model = None,
    engine: Annotated[
        Engine, typer.Option(help="Who serves; auto is vLLM where it is installed.")
    ] = Engine.AUTO,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Where to listen; others than this machine's own need --api-key.",
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="HOTEXPERTS_API_KEY",
            help="Clients must send it. The environment variable keeps it out of lists of "
            "processes.",
            show_default=False,
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="By which clients ask for the model.", show_default="MODEL"
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A Jinja template instead of the tokenizer's.", show_default=False
        ),
    ] = None,
    expert_cache_size: options.CacheSize = None,
    expert_cache_gib: options.CacheGib = None,
    policy: options.Policy = DEFAULT_POLICY,
    expert_cache_state: options.CacheState = None,
    dtype: options.WeightsDtype = options.Dtype.AUTO,
    context: options.Context = None,
    device: options.Device = None,
    expert_store: options.ExpertStore = options.Store.RAM,
    expert_packing: options.ExpertPackingName = "none",
    cache_mode: options.CacheModeName = AUTO,
    max_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Answered or waiting at a time; the next is told to try again (429).",
            show_default=str(DEFAULT_REQUESTS),
        ),
    ] = None,
    max_body: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of a request; a larger one gets 413.", show_default=DEFAULT_BODY
        ),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    no_host_memory_check: options.NoHostMemoryCheck = False,
    debug: options.Debug = False,
) -> None:
    """Serve a cached model to OpenAI's clients: chat, completions, streams, metrics.

    Where vLLM is installed this is `vllm serve` with the plug-in, and arguments after -- are
    vLLM's. Elsewhere it is Transformers' own server behind a gate, which answers one request after
    another.
    """
    with console.errors_as_one_line(debug):
        passed: list[str] = ctx.meta.get(_PASSED, [])
        size = options.cache_size(expert_cache_size, expert_cache_gib)
        parse_cache_size(size)
        POLICIES.load(policy)
        options.check_cache_mode(cache_mode, expert_store, expert_packing)
        address.check_access(host, api_key)
        template = _read_template(chat_template)
        if served_model_name is not None and not served_model_name.strip():
            raise ConfigError("--served-model-name is empty: give a name, or leave it out")
        options.check_text(served_model_name or "", "--served-model-name")
        if expert_cache_state is not None:
            options.check_output("--expert-cache-state", str(expert_cache_state))
        path = options.model_path(model)
        found, reason = choose(engine, is_demo=model is None)
        console.note(f"engine {found.value}: {reason}")
        name = served_model_name or (DEMO_NAME if model is None else path)
        if found is Engine.VLLM:
            _check_vllm(device, expert_store, expert_packing, cache_mode, max_requests, max_body)
            flags: vllm.Flags = {
                "--host": host,
                "--port": str(port),
                "--served-model-name": name if name != path else None,
                "--chat-template": None if chat_template is None else str(chat_template),
                "--dtype": dtype.value,
                "--max-model-len": None if context is None else str(context),
                "--trust-remote-code": trust_remote_code,
            }
            more = vllm.more_options(expert_cache_state, check_host_memory=not no_host_memory_check)
            flags |= vllm.cache_flags(parse_cache_size(size), policy, more)
            arguments = vllm.arguments(path, flags, passed)
            console.note(shlex.join(["vllm", *arguments]))
            vllm.run(arguments, api_key)
        if passed:
            raise ConfigError(f"{passed[0]} after '--' is for vLLM, and {found.value} serves")
        _serve(
            path,
            Limits(
                name,
                parse_bytes(max_body or DEFAULT_BODY),
                max_requests or DEFAULT_REQUESTS,
                api_key,
                None if api_key else address.local_names(host),
            ),
            host,
            port,
            expert_cache_state,
            template=template,
            context=context,
            trust_remote_code=trust_remote_code,
            expert_cache_size=size,
            policy=policy,
            expert_store=expert_store.value,
            cache_mode=cache_mode,
            expert_packing=expert_packing,
            device=device,
            dtype=dtype.value,
            check_host_memory=not no_host_memory_check,
        )


def _check_vllm(
    device: str | None,
    expert_store: options.Store,
    expert_packing: str,
    cache_mode: str,
    max_requests: int | None,
    max_body: str | None,
) -> None:
    """Refuse what vLLM has no counterpart of."""
    ours = {
        "--device": device is not None,
        "--expert-store": expert_store is not options.Store.RAM,
        "--expert-packing": expert_packing != "none",
        "--cache-mode": cache_mode != AUTO,
        "--max-requests": max_requests is not None,
        "--max-body": max_body is not None,
    }
    given = [option for option, is_given in ours.items() if is_given]
    if given:
        raise ConfigError(
            f"{', '.join(given)} cannot be had with vLLM: leave it out, or take "
            "--engine transformers"
        )


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {path} is not valid UTF-8") from error


def _serve(
    path: str,
    limits: Limits,
    host: str,
    port: int,
    state: Path | None,
    **load_options: Any,
) -> None:
    """On Transformers, until a signal."""
    from hotexperts.serve import compat

    compat.names()
    with address.reserve(host, port) as listener:
        served = _load(path, limits.model, **load_options)
        url = address.url(host, listener.getsockname()[1])

        def announce() -> None:
            typer.echo(f"{served.model.expert_cache!r}")
            typer.echo(f"serving {limits.model} at {url}/v1 until Ctrl-C")
            sys.stdout.flush()

        from hotexperts.serve.server import serve as serve_until_signal

        with kept(served.model.expert_cache, state):
            serve_until_signal(served, limits, listener, announce)


def _load(
    path: str,
    name: str,
    *,
    template: str | None,
    context: int | None,
    trust_remote_code: bool,
    **load_options: Any,
) -> Served:
    from hotexperts.cli.generate import context_length
    from hotexperts.cli.text import load_tokenizer
    from hotexperts.serve.app import Served
    from hotexperts.serve.turns import Turns
    from hotexperts.transformers import load

    length = context_length(path, context, DEFAULT_KV_TOKENS, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    if template is not None:
        tokenizer.chat_template = template
        _check_template(tokenizer)
    load_options |= {"kv_tokens": length, "trust_remote_code": trust_remote_code}
    with console.loading("loading experts") as progress:
        model = load(path, progress=progress, **load_options)
    return Served(name, model, tokenizer, Turns(length))


def _check_template(tokenizer: Any) -> None:
    """Refuse what is no template now, rather than in every chat."""
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template: line {error.lineno}: {error.message}") from error
    except TemplateError:  # it wants another beginning of a chat
        return
