"""Looks for known vulnerabilities of installed packages, by `pip-audit`.

    python tools/audit.py FOLDER

FOLDER is a site-packages. Exit status 1 where one is known, 2 where the audit itself went wrong; 0
where none is, and where the database cannot be reached, which is said.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

OUT_OF_REACH = (  # pip-audit's words, and requests'
    "Could not connect",
    "ConnectionError",
    "ConnectTimeout",
    "Max retries exceeded",
    "NameResolutionError",
    "ReadTimeout",
    "Tunnel connection failed",
)


class Verdict(NamedTuple):
    """What to say, and the exit status."""

    lines: list[str]
    status: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="site-packages")
    folder = parser.parse_args().folder
    if not folder.is_dir():
        raise SystemExit(f"{folder} is no folder: run make .venv/.installed-dev first")
    options = ["--format", "json", "--progress-spinner", "off", "--timeout", "10"]
    done = subprocess.run(
        [sys.executable, "-m", "pip_audit", "--path", str(folder), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    found = verdict(done.stdout, done.stderr)
    print("\n".join(found.lines))
    raise SystemExit(found.status)


def verdict(output: str, errors: str) -> Verdict:
    """Of what pip-audit wrote to its two streams."""
    try:
        packages: list[dict[str, Any]] = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        if any(words in errors for words in OUT_OF_REACH):
            last = errors.strip().splitlines()[-1]
            return Verdict([f"not audited: the database cannot be reached ({last:.200})"], 0)
        return Verdict([f"the audit went wrong: {errors.strip() or 'no answer'}"], 2)
    lines = [f"not audited: {p['name']}: {p['skip_reason']}" for p in packages if "vulns" not in p]
    audited = [package for package in packages if "vulns" in package]
    known = [(package, vuln) for package in audited for vuln in package["vulns"]]
    for package, vuln in known:
        fixed = ", ".join(vuln["fix_versions"]) or "no version yet"
        lines.append(f"{package['name']} {package['version']}: {vuln['id']}, fixed in {fixed}")
    lines.append(f"{len(audited)} packages audited, {len(known)} known vulnerabilities")
    if not audited:
        lines.append("the database answers, and knows none of them: is it a mirror without it?")
    return Verdict(lines, 1 if known else 0)


if __name__ == "__main__":
    main()
