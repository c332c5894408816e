"""The `hotexperts` command: its subcommands, `--version`, and the exit status.

Exit status: 0 done, 1 `verify` or `bench` found a difference or `doctor` something red, 2 an error
in what was asked for, 130 Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

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
)
app.command()(run)
app.command(cls=ServeCommand)(serve)
app.command()(verify)
app.command()(bench)
app.command(cls=SimulateCommand)(simulate)
app.command()(trace)
app.command()(report)
app.command()(plan)
app.command()(top)
app.command()(pack)
app.command()(doctor)


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
