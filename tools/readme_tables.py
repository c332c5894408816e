"""Fills the examples of README.md and docs/bench.md from real runs.

    make test 2>&1 | tee /tmp/test.log
    python tools/readme_tables.py --test-log /tmp/test.log

Between `<!-- NAME -->` and `<!-- end -->` the text is generated; the rest is left alone, and so is
the tests' block without `--test-log`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUN = ["run", "--expert-cache-size", "12", "--max-new-tokens", "60", "--prompt"]
BENCH = ["bench", "--expert-cache-size", "8,16", "--batch", "1,4"]
PROMPT = "def read_file(path):"
SUMMARIES = (  # the last words of ruff check, ruff format, mypy, lint-imports and pytest
    r"All checks passed!|\d+ files already formatted|Success: no issues found.*|Contracts: .*|"
    r"\d+ passed.*"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--test-log", type=Path, help="what `make test`, or pytest alone, said")
    test_log = parser.parse_args().test_log
    readme = ROOT / "README.md"
    text = readme.read_text()
    contents = {
        "run": fenced(f'hotexperts {" ".join(RUN)} "{PROMPT}"', command([*RUN, PROMPT])),
        "verify": fenced("hotexperts verify", command(["verify"])),
        "python": plain(output([sys.executable, "-c", python_block(text)])),
    }
    if test_log:
        contents["test"] = fenced("make test", test_summary(test_log.read_text()))
    readme.write_text(filled(text, contents))
    page = ROOT / "docs/bench.md"
    bench = fenced(f"hotexperts {' '.join(BENCH)}", command(BENCH))
    page.write_text(filled(page.read_text(), {"bench": bench}))


def filled(text: str, contents: dict[str, str]) -> str:
    """The text with these blocks' contents."""
    for name, content in contents.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text, found = re.subn(pattern, rf"\1{escape(content)}\n\2", text, flags=re.DOTALL)
        assert found == 1, name
    return text


def escape(content: str) -> str:
    return content.replace("\\", r"\\")


def fenced(shown: str, output: str) -> str:
    return f"```\n$ {shown}\n{output}\n```"


def plain(shown: str) -> str:
    return f"```\n{shown}\n```"


def python_block(text: str) -> str:
    """The README's first example."""
    found = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert found
    return found[1]


def command(arguments: list[str]) -> str:
    return output(["hotexperts", *arguments])


def output(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").split("\n"))


def test_summary(log: str) -> str:
    """The last words of each tool.

    Raises:
        SystemExit: the tests did not end, or some did not pass.
    """
    lines = [line.strip("= ") for line in log.splitlines()]
    found = [line for line in lines if re.fullmatch(SUMMARIES, line)]
    if not found or " passed" not in found[-1] or re.search(r"failed|error", found[-1]):
        raise SystemExit("the test log does not end with passed tests: run them again")
    return "\n".join(found)


if __name__ == "__main__":
    main()
