from __future__ import annotations

import builtins
import subprocess
import sys
from typing import Any

import pytest

import hotexperts
from cli.conftest import Cli
from hotexperts.cli.main import main

HEAVY = ("torch", "transformers", "safetensors", "accelerate")
IN_A_FRESH_PROCESS = f"""
import sys
from hotexperts.cli.main import main
for argv in (["--help"], ["run", "--help"], ["verify", "--help"], ["--version"]):
    assert main(argv) == 0
print([name for name in {HEAVY} if name in sys.modules])
"""


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--expert-cache-size" in done.stdout


def test_version(cli: Cli) -> None:
    assert cli("--version") == (0, f"hotexperts {hotexperts.__version__}\n", "")


def test_an_unknown_command_or_option_is_a_usage_error(cli: Cli) -> None:
    assert cli("fly").status == 2
    result = cli("run", "--prompt", "x", "--dtype", "float12")
    assert result.status == 2
    assert "float12" in result.err


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_library_is_named_with_its_extra(
    missing: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n in ("hotexperts.cli.generate", "hotexperts.cli.text")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", _without(missing, builtins.__import__))
    result = cli("run", "somewhere", "--prompt", "x")
    assert (result.status, result.out) == (2, "")
    assert result.err == (
        f"error: {missing} is not installed: pip install 'hotexperts[transformers]'\n"
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
