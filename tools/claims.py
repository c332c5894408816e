"""Writes docs/claims.md: where each number of the README comes from, and how it was measured.

    python tools/claims.py

A number that stands in a table, in `CLAIMS` or in `STATED` has its place; the test fails for any
other, and where a result no longer says what the README does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"
PAGE = ROOT / "docs/claims.md"
NUMBER = re.compile(r"(?<![\w.-])\d[\d.,]*(?![\w-])")
HEAD = """# Where the README's numbers come from

Written by `tools/claims.py`; a test compares every number with its result. Results are in
`bench/results/`, each with its machine, versions, command and commit; what a command leaves out is
`--out`, and `--traces`, a folder as [traces.md](traces.md) describes it.
"""


class Value(NamedTuple):
    """A number in a sentence.

    Attributes:
        field: where in the result it is, for readers.
        find: the number in the result.
        shown: how the README writes it.
    """

    field: str
    find: Callable[[Any], Any]
    shown: str = "{}"


class Claim(NamedTuple):
    """Words of the README with `{}` for each value, and the result that holds them."""

    said: str
    result: str
    values: tuple[Value, ...]

    def rendered(self) -> str:
        """The words as the result would have them."""
        data = load(self.result)
        return self.said.format(*(v.shown.format(v.find(data)) for v in self.values))


def field(path: str, shown: str = "{}", scale: float | None = None) -> Value:
    """A value at keys that slashes separate, times `scale`."""

    def find(data: Any) -> Any:
        for key in path.split("/"):
            data = data[key]
        return data if scale is None else data * scale

    return Value(path, find, shown)


def expert_nbytes(data: Any) -> int:
    """Three matrices in bf16."""
    shape = data["shape"]
    return int(3 * 2 * shape["hidden_size"] * shape["moe_intermediate_size"])


def all_experts_nbytes(data: Any) -> int:
    shape = data["shape"]
    return int(shape["num_hidden_layers"] * shape["num_experts"] * expert_nbytes(data))


def short_version(name: str) -> Value:
    """Major and minor of a library."""

    def find(data: Any) -> str:
        return ".".join(data["machine"]["versions"][name].split(".")[:2])

    return Value(f"machine/versions/{name}", find)


TABLES = {
    "decode": "core-decode",
    "device": "device-decode",
    "prefill": "device-prefill",
    "vllm": "vllm-decode",
    "cards": "vllm-promise",
    "load": "core-load",
}
_RUNS = "cases/{}/runs/{}, batch 1/ms"
CLAIMS = (
    Claim(
        "at {} tokens/s this way",
        "device-decode",
        (field("cases/device-6GiB-adv/tokens_per_s", "{:.0f}"),),
    ),
    Claim(
        '`device_map="auto"` gives {}',
        "device-decode",
        (field("cases/auto-6GiB/tokens_per_s/median", "{:.2f}"),),
    ),
    Claim("vLLM on {} layers", "vllm-decode", (field("shape/num_hidden_layers"),)),
    Claim(
        "takes {} ms a token, where its own offload takes {}",
        "vllm-decode",
        (
            field(_RUNS.format("cache", "32 slots"), "{:.1f}"),
            field(_RUNS.format("uva", "uva"), "{:.1f}"),
        ),
    ),
    Claim(
        "PyTorch {} and Transformers {}. Its routers",
        "core-decode",
        (short_version("torch"), short_version("transformers")),
    ),
    Claim("over {} steps only", "core-decode", (field("cases/auto-4GiB/num_steps"),)),
    Claim(
        "With {} slots, {} experts of each layer stream over the link, {} GB in all",
        "device-prefill",
        (
            field("cases/quarter-adv/capacity"),
            Value(
                "shape/num_experts less cases/quarter-adv/capacity",
                lambda d: d["shape"]["num_experts"] - d["cases"]["quarter-adv"]["capacity"],
            ),
            field("cases/quarter-adv/prefill/512/missed_bytes", "{:.1f}", 1e-9),
        ),
    ),
    Claim(
        "misses {} % more experts",
        "device-prefill",
        (field("cases/quarter-adv/interleaved/more", "{:.1f}", 100),),
    ),
    Claim(
        "{} of the 48 layers of Qwen3-30B-A3B's shape ({} experts of {} MB a layer, {} GB in all, "
        "{} a token)",
        "vllm-decode",
        (
            field("shape/num_hidden_layers"),
            field("shape/num_experts"),
            Value(
                "shape: 3 x 2 bytes x hidden_size x moe_intermediate_size",
                lambda d: expert_nbytes(d) / 1e6,
                "{:.1f}",
            ),
            Value("that of all experts", lambda d: all_experts_nbytes(d) / 1e9, "{:.0f}"),
            field("shape/num_experts_per_tok"),
        ),
    ),
    Claim(
        "all {} layers of that shape, {} GB of experts in host memory",
        "vllm-promise",
        (
            field("shape/num_hidden_layers"),
            Value("shape: bytes of all experts", lambda d: all_experts_nbytes(d) / 1e9, "{:.0f}"),
        ),
    ),
    Claim(
        "Loading a {} GB bf16 checkpoint on two CPU cores, PyTorch {} and Transformers {}",
        "core-load",
        (
            field("checkpoint_bytes", "{:.2f}", 1e-9),
            short_version("torch"),
            short_version("transformers"),
        ),
    ),
)
STATED = {  # no result holds these; where they come from instead
    "One H200 limited to 6 GiB": "the budget asked for; `device-decode.json` names its rows by it",
    "Python 3.10 to 3.13": "`pyproject.toml`",
    "12 of its 32 experts": "the command below it, and the model's `config.json`",
    "1.2 GB of disk": "no result; it moves with PyTorch's build",
    "at most 6 GiB of GPU memory": "the command below it",
    "0.9 of the free memory": "`AUTO_SHARE` in `integrations/transformers/build.py`",
    "status is 0 when done, 1 when `verify` found a difference, 2 for an error": "`cli/main.py`",
    "Transformers 5.17 and 5.24": "`hotexperts/known_versions.py`; tests run with both",
    "[29 model families]": "`tests/test_docs.py` counts them",
    "and Llama 4": "a name",
    "multiples of 4 bytes": "the kernel copies words of 32 bits",
    "0.26 on one GPU (bf16, fp8, int4, mxfp4), 0.32 on CPUs": "what was tried: `docs/vllm.md`",
    "at most 25 % outside of it": "`tools/check_plan.py` prints each; a test holds the limit",
    "26 GB/s is what PCIe 4.0 x16 reaches, 12 GB/s PCIe 3.0 x16": "stated, not measured here",
    "8, 12, 16 and 24 GiB": "the ceilings of `vllm-promise.json`",
    "Prompts of 2000 tokens": "what `bench/vllm_promise.py` does",
    "element 0 of tensors": "PyTorch's words",
    "batch 1, one H200": "the machine of `core-decode.json`, and what `bench/core_decode.py` does",
    "507M-parameter model of 64 experts, 8 a token": "about the recording, which is not here",
    "At 4 GiB": "the budget of the rows below",
    "[decision 9]": "a name",
    "in 64 steps after such a prefill": "what `bench/device_prefill.py` does",
    "In vLLM 0.26.0": "`docs/vllm.md`; `vllm-decode.json` does not name vLLM's version",
    "and 2000 tokens of prompt": "what `bench/vllm_decode.py` does",
}


@cache
def load(result: str) -> Any:
    """A result."""
    return json.loads((RESULTS / f"{result}.json").read_text())


def prose(readme: str) -> str:
    """The README without what is generated or shown, on one line; code keeps its place."""
    text = re.sub(r"<!-- (\w+) -->.*?<!-- end -->", "", readme, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return " ".join(text.split())


def numbers_without_a_place(readme: str) -> list[str]:
    """Each number that no claim and no statement covers, with the words around it."""
    text = prose(readme)
    for words in (*(claim.rendered() for claim in CLAIMS), *STATED):
        text = text.replace(words, " ")
    text = re.sub(r"`[^`]*`", "`", text)
    return [text[max(0, m.start() - 30) : m.end() + 30] for m in NUMBER.finditer(text)]


def page() -> str:
    """The page's text."""
    parts = [HEAD, "## Results\n", *_results(), "\n## Tables\n", "| table | result |", "|---|---|"]
    parts += [f"| `{table}` | `{result}.json` |" for table, result in TABLES.items()]
    parts += ["\n## Numbers in the text\n", "| README | field | result |", "|---|---|---|"]
    for claim in CLAIMS:
        fields = "; ".join(f"`{value.field}`" for value in claim.values)
        parts.append(f"| {claim.rendered()} | {fields} | `{claim.result}.json` |")
    parts += ["\n## What no result holds\n", "| README | comes from |", "|---|---|"]
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
            f"`{data['command']}` | {machine['commit'][:7]}, {machine['date']} |"
        )
    return lines


def main() -> None:
    left = numbers_without_a_place((ROOT / "README.md").read_text())
    if left:
        raise SystemExit("numbers without a place:\n" + "\n".join(left))
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
