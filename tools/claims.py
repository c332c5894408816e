"""Writes docs/claims.md: where each number of two pages comes from, and how it was measured.

    python tools/claims.py

The pages are README.md and docs/benchmarks.md. A number that stands in a table, in `CLAIMS` or in
`STATED` of `claimed.py` has its place; the test fails for any other, and where a result no longer
says what they do.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from claimed import CLAIMS, STATED, TABLES
from result_tables import load

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/claims.md"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs/benchmarks.md")
NUMBER = re.compile(r"(?<![\w.-])\d[\d.,]*(?![\w-])")
HEAD = """# Where the numbers come from

Of README.md and [Benchmarks](benchmarks.md). Written by `tools/claims.py`; a test compares every
number with its result. Results are in `bench/results/`, each with its machine, versions, command
and commit; what a command leaves out is `--out`, and `--traces`, a folder as
[traces.md](traces.md) describes it.
"""


def documents() -> str:
    """All pages, one after another."""
    return "\n".join(path.read_text() for path in DOCUMENTS)


def prose(pages: str) -> str:
    """The pages without what is generated or shown, on one line; code keeps its place."""
    text = re.sub(r"<!-- (\w+) -->.*?<!-- end -->", "", pages, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return " ".join(text.split())


def numbers_without_a_place(pages: str) -> list[str]:
    """Each number that no claim and no statement covers, with the words around it."""
    text = prose(pages)
    for words in (*(claim.rendered() for claim in CLAIMS), *STATED):
        text = text.replace(words, " ")
    text = re.sub(r"`[^`]*`", "`", text)
    return [text[max(0, m.start() - 30) : m.end() + 30] for m in NUMBER.finditer(text)]


def page() -> str:
    """The page's text."""
    parts = [HEAD, "## Results\n", *_results(), "\n## Tables\n", "| table | result |", "|---|---|"]
    parts += [f"| `{table}` | `{result}.json` |" for table, result in TABLES.items()]
    parts += ["\n## Numbers in the text\n", "| words | field | result |", "|---|---|---|"]
    for claim in CLAIMS:
        fields = "; ".join(f"`{value.field}`" for value in claim.values)
        parts.append(f"| {claim.rendered()} | {fields} | `{claim.result}.json` |")
    parts += ["\n## What no result holds\n", "| words | comes from |", "|---|---|"]
    parts += [f"| {words} | {source} |" for words, source in STATED.items()]
    return "\n".join(parts) + "\n"


def _results() -> list[str]:
    """How each result that is used was measured."""
    lines = ["| result | machine | versions | command | commit, date |", "|---|---|---|---|---|"]
    for result in dict.fromkeys([*TABLES.values(), *(claim.result for claim in CLAIMS)]):
        data = load(result)
        machine = data["machine"]
        gpu = f"{machine['gpu']}, driver {machine['driver']}" if "gpu" in machine else "no GPU"
        used = [f"{k} {v}" for k, v in machine["versions"].items() if v]
        lines.append(
            f"| `{result}.json` | {gpu}, {machine['cpu_cores']} CPU cores, Linux "
            f"{machine['kernel']} | Python {machine['python']}, {', '.join(used)} | "
            f"`{data['command']}` | {'; '.join(_measured_at(data))} |"
        )
    return lines


def _measured_at(data: dict[str, Any]) -> list[str]:
    """Commit and date; of rows that were kept from earlier runs of the command, theirs."""
    cases = data.get("cases", {})
    kept: dict[str, list[str]] = {}
    for case, row in cases.items() if isinstance(cases, dict) else ():
        if isinstance(row, dict) and "measured_at" in row:
            at = row["measured_at"]
            kept.setdefault(f"{at['commit'][:7]}, {at['date']}", []).append(f"`{case}`")
    machine = data["machine"]
    earlier = [f"{', '.join(names)} at {at}" for at, names in kept.items()]
    return [f"{machine['commit'][:7]}, {machine['date']}", *earlier]


def main() -> None:
    left = numbers_without_a_place(documents())
    if left:
        raise SystemExit("numbers without a place:\n" + "\n".join(left))
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
