"""Writes docs/troubleshooting.md: every error message of the program, with what to do about it.

    python tools/troubleshooting.py

The messages come from the source (`messages.py`). Most say what to do themselves; `remedies.py`
says it for the others. A test fails where the page is old, or a message has no remedy.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import remedies
from messages import Message, messages
from places import fixed

PAGE = Path(__file__).parent.parent / "docs/troubleshooting.md"
HEAD = """# Troubleshooting

Each command ends an error with one line, `error: ...`, and exit status 2; from Python it is an
exception, a subclass of `hotexperts.errors.HotExpertsError` and of the builtin that one would
expect. Look for the first words of the line with your browser's search: below is every message
that the program has, read from its source by `tools/troubleshooting.py`. `<name>` stands for a
value.

`--debug` shows the traceback as well. `hotexperts doctor` looks at the machine and says what to do
about it. What is slow rather than wrong is in [Tuning](tuning.md).
"""
_REMEDY = re.compile(
    "(?i)(?:^|[:;.] )("
    "(?:accept|add|append|begin|check|choose|compare|convert|copy|delete|download|draw|end|feed|"
    "free|give|install|is|it must|keep|known are|leave|list|load|lower|make|mend|merge|name|pip|"
    "please|preload|raise|record|restore|run|save|send|separate|share|skip|start|take|try|unset|"
    "upload|use|write)"
    r"\b(?! is\b).*)"
)


class Area(NamedTuple):
    """Messages that belong together.

    Attributes:
        title: of its section.
        modules: beginnings of their names.
        of_server: answers to clients, and not what ends a command.
    """

    title: str
    modules: tuple[str, ...]
    of_server: bool = False


AREAS = (  # a message goes where the longest beginning of its module is
    Area(
        "Sizes, policies, files, and what all commands share",
        ("cli.", "config", "sizing", "registry", "demo", "policy."),
    ),
    Area(
        "Models and checkpoints, in Transformers",
        (
            "integrations.transformers",
            "cli.text",
            "cache.mapped_file",
            "cache.safetensors",
            "cache.file",
            "cache.store",
            "safetensors_header",
            "gguf_header",
        ),
    ),
    Area(
        "Experts on disk",
        (
            "cache.pack_",
            "cache.disk",
            "integrations.transformers.packing",
            "integrations.transformers.tiers",
        ),
    ),
    Area("Memory and device", ("cache.host_memory", "cache.device_mode")),
    Area("`hotexperts run` and `verify`", ("cli.run", "cli.generate", "cli.compare", "cli.verify")),
    Area("vLLM", ("integrations.vllm",)),
    Area("Starting `hotexperts serve`", ("cli.serve", "serve.")),
    Area(
        "Warm starts",
        ("cache.warm_start", "policy.state", "policy.limits", "residency", "kernels.plan.layout"),
    ),
    Area(
        "`hotexperts trace` and `simulate`",
        ("cli.trace", "cli.record", "cli.simulate", "cli.foretold", "simulate.", "predict."),
    ),
    Area("`hotexperts bench`", ("cli.bench", "bench.")),
    Area("`hotexperts report`", ("cli.page", "fields")),
    Area(
        "`hotexperts plan`, `doctor`, `top`, and metrics",
        ("cli.plan", "plan.", "cli.doctor", "observe."),
    ),
    Area("The cache as a library", ("cache.", "errors", "formats.", "kernels.")),
    Area("Answers of the server", ("serve.",), of_server=True),
)


def page() -> str:
    """The page's text."""
    found = messages()
    parts = [HEAD]
    for area in AREAS:
        rows = dict.fromkeys(row(said) for said in found if area_of(said) is area)
        first = (
            "| status | answer | what to do |\n|---|---|---|"
            if area.of_server
            else ("| message | what to do |\n|---|---|")
        )
        parts += [f"## {area.title}\n", first, *rows, ""]
    return "\n".join(parts)


def area_of(said: Message) -> Area:
    """Its area.

    Raises:
        LookupError: none fits: add its module to one.
    """
    fits = {
        len(beginning): area
        for area in AREAS
        for beginning in area.modules
        if said.module.startswith(beginning) and area.of_server == (said.error == "Refusal")
    }
    if not fits:
        raise LookupError(f"no area for {said.module}: {said.text}")
    return fits[max(fits)]


def row(said: Message) -> str:
    """A line of the table."""
    what, todo = split(said)
    status = f"| {said.status} " if said.error == "Refusal" else ""
    return f"{status}| {_code(what)} | {todo} |"


def split(said: Message) -> tuple[str, str]:
    """What went wrong, and what to do.

    Raises:
        LookupError: the message does not say what to do, and `remedies.py` does not either.
    """
    if said.text in remedies.MESSAGES:
        return said.text, remedies.MESSAGES[said.text]
    found = _REMEDY.search(said.text)
    if found is None and said.module in remedies.MODULES:
        return said.text, remedies.MODULES[said.module]
    if found is None:
        raise LookupError(f"what to do about this? say it there, or here: {said}")
    what = said.text[: found.start(1)].rstrip(" ;:.")
    return (what, _escaped(found[1])) if fixed(what).strip() else (said.text, "as it says")


def _code(text: str) -> str:
    """In a cell, as code."""
    mark = "``" if "`" in text else "`"
    space = " " if mark == "``" else ""
    return f"{mark}{space}{_escaped(text, in_code=True)}{space}{mark}"


def _escaped(text: str, in_code: bool = False) -> str:
    """So that a cell shows it as it is."""
    text = text.replace("|", r"\|")
    return text if in_code else re.sub(r"([<*\[])", r"\\\1", text)


if __name__ == "__main__":
    PAGE.write_text(page())
