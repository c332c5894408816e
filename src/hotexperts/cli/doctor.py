"""`hotexperts doctor`: what this machine has for models beyond its GPU, and what to do about it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from hotexperts.cli import console, options
from hotexperts.doctor import Check, Status
from hotexperts.doctor.check import worst
from hotexperts.errors import ConfigError

_VERDICTS = {
    Status.GREEN: "All is well.",
    Status.YELLOW: "Everything works; what is yellow costs something, or is only needed for more.",
    Status.RED: "What is red keeps hotexperts from working.",
}


def doctor(
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Measure the disk here: where the checkpoints are.",
            show_default="the folder for temporary files",
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Copy and read some hundred megabytes."),
    ] = True,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Look at GPU, link, memory, disk and versions: what is well, what costs, what is amiss.

    Exit status 1 where something is red. Works without a GPU.
    """
    with console.errors_as_one_line(debug):
        place = folder or Path(tempfile.gettempdir())
        if not place.is_dir():
            raise ConfigError(f"--folder {place} is no folder: name one that exists")
        if folder is not None and not measure:
            raise ConfigError("--folder says where to measure: use it without --no-measure")
        with console.prints_to_stderr():
            checks = _look(place, measures=measure)
        if as_json:
            console.show_json([check.as_dict() for check in checks])
        else:
            console.show(_table(checks))
            typer.echo(_VERDICTS[worst(checks)])
    if worst(checks) is Status.RED:
        raise typer.Exit(1)


def _look(folder: Path, *, measures: bool) -> list[Check]:
    from hotexperts.doctor.gpu import check_gpus
    from hotexperts.doctor.host import check_disk, check_host
    from hotexperts.doctor.versions import check_versions

    checks = list(check_versions())
    if worst(checks) is Status.RED:
        return checks  # the others need what is missing
    checks += check_gpus(measures=measures)
    checks += check_host()
    if measures:
        checks.append(check_disk(folder))
    return checks


def _table(checks: list[Check]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        mark = f"[{check.status.value}]{check.status.value}[/]"
        table.add_row(
            mark, *(escape(text) for text in (check.name, check.found, check.remedy or ""))
        )
    return table
