"""Fills the examples of README.md, docs/bench.md and docs/plan.md from real runs.

    make test 2>&1 | tee /tmp/test.log
    python tools/readme_tables.py --test-log /tmp/test.log

Between `<!-- NAME -->` and `<!-- end -->` the text is generated; the rest is left alone, and so is
the tests' block without `--test-log`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from result_tables import load

ROOT = Path(__file__).parent.parent
RUN = ["run", "--expert-cache-size", "12", "--max-new-tokens", "60", "--prompt"]
BENCH = ["bench", "--expert-cache-size", "8,16", "--batch", "1,4"]
PLAN_OPTIONS = "--vram 8GiB,12GiB,16GiB,24GiB --link-gb-s 26 --context 2048"
PLAN = ["plan", "Qwen3-30B-A3B", *PLAN_OPTIONS.split()]
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
    plan = ROOT / "docs/plan.md"
    plan.write_text(filled(plan.read_text(), {"plan": plan_example()}))


def plan_example() -> str:
    """What plan says of a checkpoint of this shape: its headers, and a hole for its weights."""
    shape = load("vllm-promise")["shape"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "Qwen3-30B-A3B"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(shape))
        write_headers(folder / "model.safetensors", shape)
        found = output(["hotexperts", *PLAN], cwd=name)
    return fenced(f"hotexperts {' '.join(PLAN)}", found)


def write_headers(path: Path, shape: dict[str, Any]) -> None:
    """The tensors of Qwen3-MoE in bf16."""
    hidden, width = shape["hidden_size"], shape["moe_intermediate_size"]
    queries, keys = (
        shape[f"num_{kind}_heads"] * shape["head_dim"] for kind in ("attention", "key_value")
    )
    sizes = {"model.embed_tokens": shape["vocab_size"] * hidden}
    sizes["lm_head"] = sizes["model.embed_tokens"]
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        sizes[f"{prefix}.self_attn.qkvo"] = hidden * 2 * (queries + keys)
        sizes[f"{prefix}.mlp.gate"] = hidden * shape["num_experts"]
        for expert in range(shape["num_experts"]):
            for matrix in ("gate_proj", "up_proj", "down_proj"):
                sizes[f"{prefix}.mlp.experts.{expert}.{matrix}"] = hidden * width
    header, end = {}, 0
    for name, size in sizes.items():
        places = [end, end + 2 * size]
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": [size], "data_offsets": places}
        end += 2 * size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


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


def output(argv: list[str], cwd: str | None = None) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=cwd)
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
