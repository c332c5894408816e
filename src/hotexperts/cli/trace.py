"""`hotexperts trace`: record which experts a model asks for, or draw it at random."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotexperts.cli import console, groups, options
from hotexperts.cli.expert_options import EXPERTS, ExpertOptions
from hotexperts.config import parse_cache_size
from hotexperts.errors import ConfigError, HotExpertsError
from hotexperts.plain_file import plain

if TYPE_CHECKING:
    from hotexperts.integrations.transformers.recording import Recorded

_KINDS = ("uniform", "zipf", "phases", "fitted")
_STDIN = "-"
_OF_SYNTHETIC = {"tokens", "sequences", "layers", "experts", "top_k", "seed"}
_OF_BOTH = {"out", "synthetic", "debug"}


@groups.expanded
def trace(
    call: typer.Context,
    model: options.Model = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Texts to continue, one a line; '-' reads stdin.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE.npz", help="The trace to write.", show_default=False),
    ] = None,
    logits: Annotated[
        bool, typer.Option("--logits", help="Record the routers' logits as well.")
    ] = False,
    guesses: Annotated[
        bool,
        typer.Option(
            "--guesses",
            help="Record which experts the next layer's router makes of each layer's output, too.",
        ),
    ] = False,
    licence: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Of the recording, for its meta data."),
    ] = "not stated",
    expert_cache_size: options.CacheSize = None,
    expert_cache_gib: options.CacheGib = None,
    max_new_tokens: options.MaxNewTokens = 128,
    device: options.Device = None,
    expert_options: Annotated[
        ExpertOptions, groups.without("expert_packing", "expert_dtype", "prefetch")
    ] = EXPERTS,
    dtype: options.WeightsDtype = options.Dtype.AUTO,
    context: options.Context = None,
    chat: options.Chat = None,
    trust_remote_code: options.TrustRemoteCode = False,
    no_host_memory_check: options.NoHostMemoryCheck = False,
    synthetic: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(_KINDS),
            help="Draw at random instead: every expert as likely, popular ones, popular ones that "
            "change three times, or fitted to Qwen3-30B-A3B.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of each sequence.")] = 300,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences to draw.")] = 48,
    layers: Annotated[int, typer.Option(min=1, help="Layers to draw.")] = 8,
    experts: Annotated[int, typer.Option(min=1, help="Of each layer.")] = 128,
    top_k: Annotated[int, typer.Option(min=1, help="Experts a token.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    debug: options.Debug = False,
) -> None:
    """Write a trace for `simulate`: the experts that each token of each prompt asks for.

    Each line of FILE is a sequence of its own, continued with the likeliest tokens. Ctrl-C keeps
    what was recorded.

    With --synthetic no model is needed, and everything is decode.
    """
    with console.errors_as_one_line(debug):
        _check_given(call, synthetic)
        if synthetic is not None:
            _draw(out, synthetic, (sequences, tokens, layers, experts, top_k), seed)
            return
        size = options.cache_size(expert_cache_size, expert_cache_gib)
        parse_cache_size(size)
        load_options = expert_options.for_load(
            device=device, dtype=dtype, no_host_memory_check=no_host_memory_check
        )
        options.check_text(licence, "--licence")
        texts, path = _read_prompts(prompts), _out(out)

        from hotexperts.cli.record import Recording

        recording = Recording.open(
            options.model_path(model),
            max_new_tokens=max_new_tokens,
            chat=chat,
            context=context,
            trust_remote_code=trust_remote_code,
            expert_cache_size=size,
            **load_options,
        )
        pieces = recording.pieces(texts, with_logits=logits, with_guesses=guesses)
        meta = recording.meta(licence)
        _write(path, pieces, len(texts), recording.num_experts, meta)


def _check_given(call: typer.Context, synthetic: str | None) -> None:
    """Refuse options that the other kind of trace takes."""
    for name in options.given_names(call):
        option = options.option_of(name)
        if synthetic is None and name in _OF_SYNTHETIC:
            raise ConfigError(f"{option} is for --synthetic: leave it out, or give that as well")
        if synthetic is not None and name not in _OF_SYNTHETIC | _OF_BOTH:
            raise ConfigError(f"{option} is for recording a model: leave it out with --synthetic")


def _out(name: str | None) -> Path:
    from hotexperts.simulate.writer import check_out

    if name is None:
        raise ConfigError("give --out FILE.npz")
    return check_out(options.check_text(name, "--out"))


def _read_prompts(name: str | None) -> list[tuple[str, str]]:
    """Each prompt and where it stands; empty lines are skipped."""
    if name is None:
        raise ConfigError("give --prompts FILE with one prompt a line, or --synthetic KIND")
    shown = "stdin" if name == _STDIN else f"--prompts {name}"
    try:
        text = options.stdin_text() if name == _STDIN else _read(Path(name))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown} is not valid {error.encoding}: give it in that") from error
    except OSError as error:
        raise ConfigError(
            f"{shown} cannot be read ({error.strerror}): give a file, or - for stdin"
        ) from error
    options.check_text(text, shown)
    lines = [(f"{shown}, line {n}", line) for n, line in enumerate(text.split("\n"), start=1)]
    found = [(place, line.rstrip("\r")) for place, line in lines if line.strip()]
    if not found:
        raise ConfigError(f"{shown} holds no text: give one prompt a line")
    return found


def _read(path: Path) -> str:
    return plain(path).read_text(encoding="utf-8-sig")


def _draw(out: str | None, kind: str, numbers: Sequence[int], seed: int) -> None:
    from hotexperts.simulate.generate import TraceSize, generate, synthetic_meta

    size = TraceSize(*numbers)
    drawn = generate(kind, size, seed)
    pieces = ((ids, 1, None, None) for ids in drawn)
    _write(
        _out(out), pieces, size.num_sequences, size.num_experts, synthetic_meta(kind, size, seed)
    )


def _write(
    out: Path,
    pieces: Iterable[Recorded | tuple[Any, int, None, None]],
    total: int,
    num_experts: int,
    meta: Mapping[str, Any],
) -> None:
    """Write what each sequence brought; where they end early, what came."""
    from hotexperts.cli.guessed import Guessed
    from hotexperts.simulate.writer import TraceWriter

    stopped: BaseException | None = None
    guessed = Guessed()
    counting = console.counting("recording", total)
    with TraceWriter(out, num_experts, meta) as writer, counting as on_done:
        try:
            for seq, (ids, phase, logits, guesses) in enumerate(pieces):
                writer.append(ids, phase, seq, logits=logits, guesses=guesses)
                guessed.add(ids, guesses)
                on_done()
        except (Exception, KeyboardInterrupt) as error:
            if not writer.num_tokens:
                raise
            stopped = error
    tokens, layers, top_k = writer.shape
    found = f"{out}: {tokens} tokens, {layers} layers, {top_k} of {num_experts} experts{guessed}"
    if isinstance(stopped, KeyboardInterrupt):
        typer.echo(f"stopped; what was recorded is in {found}", err=True)
        raise typer.Exit(console.EXIT_INTERRUPTED)
    if isinstance(stopped, HotExpertsError):
        raise ConfigError(f"{stopped}; what was recorded before is in {found}") from stopped
    if stopped is not None:
        raise stopped
    typer.echo(found)
