"""`hotexperts serve`: an OpenAI-compatible server, vLLM's or Transformers' own."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from hotexperts.cli import console, groups, options
from hotexperts.cli.expert_options import EXPERTS, ExpertOptions
from hotexperts.cli.state import kept
from hotexperts.config import CacheSize, parse_cache_size
from hotexperts.errors import ConfigError
from hotexperts.plain_file import plain
from hotexperts.policy import DEFAULT_POLICY
from hotexperts.serve import address, vllm
from hotexperts.serve.engine import Engine, choose
from hotexperts.serve.gate import Limits

DEMO_NAME = "hotexperts-demo"
_PASSED = "vllm arguments"  # in the context's meta
_NOT_VLLMS: dict[str, Any] = {  # and what vLLM does anyway
    "device": None,
    "expert_store": EXPERTS.expert_store,
    "expert_ram_gib": EXPERTS.expert_ram_gib,
    "expert_ram_policy": EXPERTS.expert_ram_policy,
    "expert_pack": EXPERTS.expert_pack,
    "expert_dtype": EXPERTS.expert_dtype,
    "cache_mode": EXPERTS.cache_mode,
    "max_requests": None,
    "max_body": None,
}


class Command(TyperCommand):
    """Keeps what comes after `--` for vLLM."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split there; the rest is ours."""
        if "--" in args:
            place = args.index("--")
            args, ctx.meta[_PASSED] = args[:place], args[place + 1 :]
        return super().parse_args(ctx, args)


@groups.expanded
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
    expert_options: ExpertOptions = EXPERTS,
    max_requests: Annotated[
        int,
        typer.Option(
            min=1, help="Answered or waiting at a time; the next is told to try again (429)."
        ),
    ] = 16,
    max_body: Annotated[
        str, typer.Option(metavar="SIZE", help="Of a request; a larger one gets 413.")
    ] = "1MiB",
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
        size = options.cache_size(expert_cache_size, expert_cache_gib)
        cache_size = parse_cache_size(size)
        load_options = expert_options.for_load(
            device=device,
            dtype=dtype,
            policy=policy,
            no_host_memory_check=no_host_memory_check,
        )
        address.check_access(host, api_key)
        template = _read_template(chat_template)
        _check_names(served_model_name, expert_cache_state)
        path = options.model_path(model)
        found, reason = choose(engine, is_demo=model is None)
        console.note(f"engine {found.value}: {reason}")
        name = served_model_name or (DEMO_NAME if model is None else path)
        passed: list[str] = ctx.meta.get(_PASSED, [])
        if found is Engine.VLLM:
            _become_vllm(ctx, path, name, cache_size, passed)
        if passed:
            raise ConfigError(
                f"{passed[0]} after '--' is for vLLM, and {found.value} serves: leave it out, or "
                "take --engine vllm"
            )
        hosts = None if api_key else address.local_names(host)
        limits = Limits(name, options.nbytes("--max-body", max_body), max_requests, api_key, hosts)
        _serve(
            path,
            limits,
            host,
            port,
            expert_cache_state,
            template=template,
            context=context,
            trust_remote_code=trust_remote_code,
            expert_cache_size=size,
            **load_options,
        )


def _become_vllm(
    ctx: typer.Context, path: str, name: str, size: CacheSize, passed: list[str]
) -> NoReturn:
    """This process is `vllm serve` from here on.

    Args:
        ctx: with the command's parameters.
        path: of the model.
        name: by which clients ask for it.
        size: of the cache.
        passed: arguments for vLLM itself.

    Raises:
        ConfigError: an option that vLLM has not, or one given twice.
    """
    _check_vllm(ctx)
    given = ctx.params
    flags: vllm.Flags = {
        "--host": given["host"],
        "--port": str(given["port"]),
        "--served-model-name": name if name != path else None,
        "--chat-template": _text(given["chat_template"]),
        "--dtype": options.Dtype(given["dtype"]).value,
        "--max-model-len": _text(given["context"]),
        "--trust-remote-code": given["trust_remote_code"],
    }
    more = vllm.more_options(
        given["expert_cache_state"],
        given["expert_packing"],
        given["prefetch"],
        check_host_memory=not given["no_host_memory_check"],
    )
    flags |= vllm.cache_flags(size, given["policy"], more)
    arguments = vllm.arguments(path, flags, passed)
    console.note(shlex.join(["vllm", *arguments]))
    vllm.run(arguments, given["api_key"])


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _check_names(served_model_name: str | None, state: Path | None) -> None:
    if served_model_name is not None and not served_model_name.strip():
        raise ConfigError("--served-model-name is empty: give a name, or leave it out")
    options.check_text(served_model_name or "", "--served-model-name")
    if state is not None:
        options.check_output("--expert-cache-state", str(state))


def _check_vllm(ctx: typer.Context) -> None:
    """Refuse what vLLM has no counterpart of."""
    if str(ctx.params["model"]).endswith(".gguf"):
        raise ConfigError(
            f"{ctx.params['model']}: vLLM with hotexperts reads no GGUF: take --engine transformers"
        )
    given = [
        options.option_of(name)
        for name in options.given_names(ctx)
        if name in _NOT_VLLMS and ctx.params[name] != _NOT_VLLMS[name]
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)} cannot be had with vLLM: leave it out, or take "
            "--engine transformers"
        )


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return plain(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {path} is not valid UTF-8: save it so") from error
    except OSError as error:
        raise ConfigError(
            f"--chat-template {path} cannot be read ({error.strerror}): give a file"
        ) from error


def _serve(
    path: str,
    limits: Limits,
    host: str,
    port: int,
    state: Path | None,
    *,
    template: str | None,
    **load_options: Any,
) -> None:
    """On Transformers, until a signal."""
    from hotexperts.serve import compat

    compat.names()  # what is missing is named here, not after the model has loaded

    from hotexperts.cli.opened import open_model
    from hotexperts.serve.app import Served
    from hotexperts.serve.server import serve as serve_until_signal
    from hotexperts.serve.turns import Turns

    with address.reserve(host, port) as listener:
        opened = open_model(path, prepare=partial(_set_template, template), **load_options)
        turns = Turns(opened.context)
        served = Served(limits.model, opened.model, opened.tokenizer, turns)
        url = address.url(host, listener.getsockname()[1])

        def announce() -> None:
            typer.echo(f"{served.model.expert_cache!r}")
            typer.echo(f"serving {limits.model} at {url}/v1 until Ctrl-C")
            sys.stdout.flush()

        with kept(served.model.expert_cache, state):
            serve_until_signal(served, limits, listener, announce)


def _set_template(template: str | None, tokenizer: Any) -> None:
    """Refuse what is no template now, rather than in every chat."""
    from jinja2 import TemplateError, TemplateSyntaxError

    if template is None:
        return
    tokenizer.chat_template = template
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"--chat-template, line {error.lineno}: {error.message}: mend the Jinja template"
        ) from error
    except TemplateError:  # it wants another beginning of a chat
        return
