"""Fills the README's figures from `bench/results/` and its examples from real runs.

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

ROOT = Path(__file__).parent.parent
RUN = ["run", "--expert-cache-size", "12", "--max-new-tokens", "60", "--prompt"]
BENCH = ["bench", "--expert-cache-size", "8,16", "--batch", "1,4"]
PLAN_OPTIONS = "--vram 8GiB,12GiB,16GiB,24GiB --link-gb-s 26 --context 2048"
PLAN = ["plan", "Qwen3-30B-A3B", *PLAN_OPTIONS.split()]
PROMPT_TOKENS = 2000  # of a prefill in vLLM
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
        "decode": decode_table(),
        "device": device_table(),
        "prefill": prefill_table(),
        "load": load_table(),
        "vllm": vllm_table(),
        "cards": cards_table(),
    }
    if test_log:
        contents["test"] = fenced("make test", test_summary(test_log.read_text()))
    readme.write_text(filled(text, contents))
    page = ROOT / "docs/bench.md"
    bench = fenced(f"hotexperts {' '.join(BENCH)}", command(BENCH))
    page.write_text(filled(page.read_text(), {"bench": bench}))
    plan = ROOT / "docs/plan.md"
    plan.write_text(filled(plan.read_text(), {"plan": plan_example()}))
    policies = ROOT / "docs/policies.md"
    policies.write_text(filled(policies.read_text(), {"policies": policy_tables()}))


def plan_example() -> str:
    """What plan says of a checkpoint of this shape: its headers, and a hole for its weights."""
    shape = json.loads((ROOT / "bench/results/vllm-promise.json").read_text())["shape"]
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


def decode_table() -> str:
    results = json.loads((ROOT / "bench/results/core-decode.json").read_text())
    lines = [
        "| case | tokens/s (lowest, highest) | slots a layer | hit rate | peak GPU memory |",
        "|---|---|---|---|---|",
    ]
    for case, row in results["cases"].items():
        speed = row["tokens_per_s"]
        lines.append(
            f"| {case} | {speed['median']:.2f} ({speed['min']:.2f}, {speed['max']:.2f}) "
            f"| {row.get('capacity', '')} | {percent(row.get('hit_rate'))} "
            f"| {row['peak_gpu_bytes'] / 2**30:.2f} GiB |"
        )
    return "\n".join(lines)


def device_table() -> str:
    results = json.loads((ROOT / "bench/results/device-decode.json").read_text())
    lines = [
        "| case | tokens/s | ms a step (mean) | slots a layer | hit rate |",
        "|---|---|---|---|---|",
    ]
    for case, row in results["cases"].items():
        mean = f"{row['step_ms_mean']:.2f}" if "step_ms_mean" in row else ""
        speed = row["tokens_per_s"]
        speed = speed["median"] if isinstance(speed, dict) else speed
        lines.append(
            f"| {case} | {speed:.{1 if speed >= 10 else 2}f} | {mean} | {row.get('capacity', '')} "
            f"| {percent(row.get('hit_rate'))} |"
        )
    return "\n".join(lines)


def prefill_table() -> str:
    results = json.loads((ROOT / "bench/results/device-prefill.json").read_text())
    names = {
        "resident": "every expert on the GPU",
        "all": "64 slots a layer, all hit",
        "quarter-adv": "16 slots a layer",
    }
    lines = ["| | 512 tokens | 2048 | 8192 |", "|---|---|---|---|"]
    for case, row in results["cases"].items():
        cells = []
        for found in row["prefill"].values():
            part = f" ({percent(found['part_of_link'])} of the link)" if found["gb_s"] else ""
            cells.append(f"{found['ms']['median']:.0f} ms{part}")
        lines.append(f"| {names[case]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def load_table() -> str:
    results = json.loads((ROOT / "bench/results/core-load.json").read_text())
    names = {
        "transformers": "Transformers alone",
        "file": "experts left in the file",
        "ram": "experts copied into memory",
    }
    lines = ["| way | seconds | memory |", "|---|---|---|"]
    for way, row in results["ways"].items():
        seconds, memory = row["seconds"]["median"], row["over_torch"] / 1e9
        lines.append(f"| {names[way]} | {seconds:.2f} | {memory:.2f} GB |")
    return "\n".join(lines)


def vllm_table() -> str:
    """A step of each batch in the engine without a cache, in the one with it, and offloaded."""
    results = json.loads((ROOT / "bench/results/vllm-decode.json").read_text())
    ways = {
        "stock vLLM, every expert on the GPU": ("stock", "stock"),
        "the same in the engine below": ("cache", "resident"),
        "128 slots (all)": ("cache", "128 slots"),
        "96 slots": ("cache", "96 slots"),
        "64 slots": ("cache", "64 slots"),
        "32 slots": ("cache", "32 slots"),
        "16 slots": ("cache", "16 slots"),
        "vLLM's UVA offload of experts": ("uva", "uva"),
        "32 slots, host-managed LRU without graphs": ("eager", "eager host, 32 slots"),
    }
    lines = ["| | batch 1 | batch 8 | batch 32 | prefill |", "|---|---|---|---|---|"]
    for name, (case, way) in ways.items():
        runs = results["cases"][case]["runs"]
        columns = ("batch 1", "batch 8", "batch 32", "prefill")
        cells = [vllm_cell(runs.get(f"{way}, {column}")) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cards_table() -> str:
    """Ceilings of GPU memory: measured, and what the missed bytes alone take over slower links."""
    results = json.loads((ROOT / "bench/results/vllm-promise.json").read_text())
    found = results["cases"]["whole"]
    lines = [
        "| GPU memory | slots a layer | hits | tokens/s, batch 1 | batch 8 | prompt tokens/s "
        "| at most by 26 GB/s: batch 1, 8 | by 12 GB/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, ceiling in found["ceilings"].items():
        one, eight, prefill = (
            found["runs"][f"{name}, {what}"] for what in ("batch 1", "batch 8", "prefill")
        )
        slower = [
            ", ".join(f"{run['forecast_tokens_per_s'][link]:.0f}" for run in (one, eight))
            for link in ("26 GB/s", "12 GB/s")
        ]
        lines.append(
            f"| {name} | {ceiling['slots']} of {results['shape']['num_experts']} "
            f"| {percent(one['hit_rate'])} | {one['tokens_per_s']:.0f} "
            f"| {eight['tokens_per_s']:.0f} | {1e3 * PROMPT_TOKENS / prefill['ms']:.0f} "
            f"| {' | '.join(slower)} |"
        )
    return "\n".join(lines)


def policy_tables() -> str:
    """A table a trace, policies by their mean, bounds last; the best of each column in bold."""
    results = json.loads((ROOT / "bench/results/policies.json").read_text())
    tables = []
    for trace, columns in results["hit_rates"].items():
        bounds = ("belady-atomic", "belady")
        names = [name for name in next(iter(columns.values())) if name not in bounds]
        names.sort(key=lambda name: -sum(column[name] for column in columns.values()))
        lines = [f"| {trace} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
        best = {title: max(column[n] for n in names) for title, column in columns.items()}
        for name in (*names, *bounds):
            cells = []
            for title, column in columns.items():
                shown = f"{100 * column[name]:.1f}"
                is_best = name in names and shown == f"{100 * best[title]:.1f}"
                cells.append(f"**{shown}**" if is_best else shown)
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def vllm_cell(run: dict[str, Any] | None) -> str:
    if run is None:
        return ""
    is_partial = run.get("hit_rate", 1) < 0.999
    return f"{run['ms']:.1f} ms" + (f" ({percent(run['hit_rate'])} hits)" if is_partial else "")


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


if __name__ == "__main__":
    main()
