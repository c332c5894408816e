"""The Python blocks of the README run, and its commands exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import typer

from hotexperts.cli.main import app

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.transformers
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs Transformers")
@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.split("\n")[0])
def test_python_blocks_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, str(README), "exec"), {})
    assert capsys.readouterr().out.strip()


def test_every_option_in_the_readme_exists() -> None:
    root = typer.main.get_command(app)
    used = re.findall(r"hotexperts (run|verify)\b([^\n`]*)", README.read_text())
    assert {command for command, _ in used} == {"run", "verify"}
    for command, rest in used:
        parameters = root.commands[command].params
        known = {name for p in parameters for name in (*p.opts, *p.secondary_opts)}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known, (command, rest)
