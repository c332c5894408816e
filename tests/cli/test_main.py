from __future__ import annotations

import builtins
import subprocess
import sys
from typing import Any

import pytest

import hotexperts
from cli.conftest import Cli
from hotexperts.cli.main import main
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
def test_help_shows_options_and_defaults(
    command: str, shown: list[str], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 200)
    result = cli(command, "--help")
    assert result.status == 0
    assert [part for part in shown if part not in result.out] == []


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
