"""The `hotexperts` command: its subcommands, `--version`, and the exit status.

Exit status: 0 done, 1 `verify` or `bench` found a difference or `doctor` something red, 2 an error
in what was asked for, 130 Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, TypeAlias

import typer
from typer.core import TyperCommand

import hotexperts
from hotexperts.cli.bench import bench
from hotexperts.cli.doctor import doctor
from hotexperts.cli.pack import pack
from hotexperts.cli.page import report
from hotexperts.cli.plan import plan
from hotexperts.cli.run import run
from hotexperts.cli.serve import Command as ServeCommand
from hotexperts.cli.serve import serve
from hotexperts.cli.simulate import Command as SimulateCommand
from hotexperts.cli.simulate import simulate
from hotexperts.cli.top import top
from hotexperts.cli.trace import trace
from hotexperts.cli.verify import verify

app = typer.Typer(
    name="hotexperts",
    help="Run Mixture-of-Experts models bigger than the GPU through a cache of expert slots.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its panels cut the names of options off at 80 columns
)
_Command: TypeAlias = Callable[..., None]
_COMMANDS: dict[_Command, str] = {  # in a line of a terminal; its own help has more
    run: "Generate text with a cached model; report hits, bytes and speed.",
    serve: "Serve a cached model to OpenAI's clients.",
    verify: "Compare a cached model with the resident one, bit for bit.",
    bench: "Measure a cached model beside the resident one.",
    simulate: "Replay recorded routing through policies, without a model.",
    trace: "Record which experts each token asks for, or draw it.",
    report: "Write one HTML page of a trace or of a command's JSON.",
    plan: "Reckon slots, memory and speed from a model's headers.",
    top: "Watch the hit rate and the copies of a running server.",
    pack: "Write a checkpoint's experts to a file for --expert-store disk.",
    doctor: "Look at GPU, link, memory, disk and versions; say what to do.",
}
_CLASSES: dict[_Command, type[TyperCommand]] = {
    serve: ServeCommand,
    simulate: SimulateCommand,
}
for _command, _line in _COMMANDS.items():
    app.command(cls=_CLASSES.get(_command), short_help=_line)(_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hotexperts {hotexperts.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and leave."
        ),
    ] = False,
) -> None:
    """Run Mixture-of-Experts models bigger than the GPU through a cache of expert slots."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; None takes the process's.

    Returns:
        The exit status.
    """
    try:
        app(args=None if argv is None else list(argv), prog_name="hotexperts")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0
