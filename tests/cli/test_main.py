from __future__ import annotations

import builtins
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import hotexperts
from cli.conftest import Cli
from hotexperts.__main__ import main as begin
from hotexperts.cli.main import app, main
from hotexperts.serve import compat


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (
            "run",
            [
                "--expert-cache-size",
                "default: (auto)",
                "default: (where the tokenizer has one)",
                "--cache-mode",
                "auto|host|device",
                "default: auto",
            ],
        ),
        (
            "verify",
            [
                "--cache-mode",
                "auto|host|device",
                "--tolerance",
                "Slots a layer, 'auto', or budgets such as 6GiB. Separate several by",
                "default: (1, a quarter, half and all of the experts)",
            ],
        ),
    ],
)
def test_help_shows_options_and_defaults(command: str, shown: list[str], cli: Cli) -> None:
    result = cli(command, "--help")
    assert result.status == 0
    words = " ".join(result.out.split())
    assert [part for part in shown if part not in words] == []


COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("columns", ["80", "50"])
def test_help_has_every_option_whole_in_a_narrow_terminal(
    command: str, columns: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    said = cli(command, "--help").out
    names = {name for p in COMMANDS[command].params for name in p.opts if name.startswith("--")}
    assert {name for name in names if name not in said.split()} == set()
    assert max(map(len, said.splitlines())) <= 80


def test_the_list_of_commands_has_a_whole_line_of_each(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("--help").out.split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in lines] == list(COMMANDS)
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


def test_version(cli: Cli) -> None:
    assert cli("--version") == (0, f"hotexperts {hotexperts.__version__}\n", "")


def test_the_package_is_a_command_too() -> None:
    command = [sys.executable, "-m", "hotexperts"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"hotexperts {hotexperts.__version__}\n")
    assert subprocess.run([*command, "fly"], capture_output=True).returncode == 2


def test_an_unknown_command_or_option_is_a_usage_error(cli: Cli) -> None:
    assert cli("fly").status == 2
    result = cli("run", "--prompt", "x", "--dtype", "float12")
    assert result.status == 2
    assert "float12" in result.err


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_library_is_named_with_its_extra(
    missing: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("generate", "opened", "text"):
        monkeypatch.delitem(sys.modules, f"hotexperts.cli.{name}", raising=False)
    monkeypatch.setattr(builtins, "__import__", _without(missing, builtins.__import__))
    result = cli("run", "somewhere", "--prompt", "x")
    assert (result.status, result.out) == (2, "")
    assert result.err == (
        f"error: {missing} is not installed: pip install -e '.[transformers]' in the source "
        "folder\n"
    )


@pytest.mark.transformers
@pytest.mark.parametrize("missing", ["fastapi", "openai", "uvicorn"])
def test_what_serving_lacks_is_said_before_the_model_loads(
    missing: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    compat.names.cache_clear()
    monkeypatch.setattr(builtins, "__import__", _without(missing, builtins.__import__))
    result = cli("serve", "somewhere", "--engine", "transformers")
    assert (result.status, result.out) == (2, "")
    assert result.err.splitlines()[-1] == (
        f"error: {missing} is not installed: pip install -e '.[serve]' in the source folder"
    )


def _without(missing: str, original: Any) -> Any:
    def find(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *args, **kwargs)

    return find


def test_the_process_arguments_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hotexperts", "--version"])
    assert main() == 0


def test_ctrl_c_while_the_command_is_imported_ends_it_quietly(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = builtins.__import__

    def interrupted(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "hotexperts.cli.main":
            raise KeyboardInterrupt
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert begin() == 130
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("run", "--interactive"), "--interactive asks on stdin, which is closed: give --prompt"),
        (("trace", "--prompts", "-", "--out", "t.npz"), "stdin is closed: give it a text, or name"),
    ],
)
def test_a_closed_stdin_is_said(
    command: tuple[str, ...], said: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    result = cli(*command)
    assert result.status == 2
    assert result.err.startswith(f"error: {said}")


def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, access = tmp_path / "s.json", os.access
    # By hand, for root may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    result = cli("run", "--prompt", "x", "--expert-cache-state", out)
    assert (result.status, result.out) == (2, "")
    said = f"--expert-cache-state {out}: not writable: name another file, or change its rights"
    assert result.err == f"error: {said}\n"
