"""The Python blocks of the documents run, commands and files exist, the models are the zoo's."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import typer

from hotexperts.cli.main import app

ROOT = Path(__file__).parent.parent
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
MODELS, TRACES = ROOT / "docs/models.md", ROOT / "docs/traces.md"
POLICIES, VLLM = ROOT / "docs/policies.md", ROOT / "docs/vllm.md"
SERVING, BENCH = ROOT / "docs/serving.md", ROOT / "docs/bench.md"
CLAIMS, PLAN = ROOT / "docs/claims.md", ROOT / "docs/plan.md"
DOCUMENTS = (README, CONTRIBUTING, MODELS, TRACES, POLICIES, VLLM, SERVING, BENCH, CLAIMS, PLAN)
PACKAGE = ROOT / "src/hotexperts"
HOMES = (  # what names of files may be relative to
    ROOT,
    ROOT / "src",
    PACKAGE,
    PACKAGE / "cache",
    PACKAGE / "kernels/plan",
    PACKAGE / "integrations/transformers",
    PACKAGE / "integrations/vllm",
    PACKAGE / "serve",
    ROOT / "docs",
    ROOT / "bench/results",
)
needs_transformers = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"), reason="needs Transformers"
)


def blocks(language: str) -> list[str]:
    text = README.read_text() + TRACES.read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.transformers
@needs_transformers
@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.split("\n")[0])
def test_python_blocks_run(
    block: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(README), "exec"), {})
    assert capsys.readouterr().out.strip()


def test_every_option_in_the_documents_exists() -> None:
    root = typer.main.get_command(app)
    commands = (
        "run",
        "serve",
        "verify",
        "simulate",
        "trace",
        "doctor",
        "plan",
        "report",
        "bench",
        "top",
    )
    texts = "".join(document.read_text() for document in DOCUMENTS)
    used = re.findall(rf"hotexperts ({'|'.join(commands)})\b([^\n`]*)", texts)
    assert {command for command, _ in used} == set(commands)
    for command, rest in used:
        parameters = root.commands[command].params
        known = {name for p in parameters for name in (*p.opts, *p.secondary_opts)}
        ours, _, _ = rest.partition(" -- ")  # the rest is vLLM's
        assert set(re.findall(r"--[a-z-]+", ours)) <= known, (command, rest)


@pytest.mark.transformers
@needs_transformers
def test_the_listed_models_are_the_tested_ones() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from integrations import zoo

    listed = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|$", MODELS.read_text(), flags=re.MULTILINE))
    tested = [zoo.model_type(family) for family in zoo.FAMILIES]
    assert listed == {name: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in tested}
    assert f"[{len(listed)} model families](docs/models.md)" in README.read_text()
    assert [name for name in zoo.OTHERS if f"`{name}`" not in MODELS.read_text()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_file_in_the_documents_exists(document: Path) -> None:
    text = document.read_text()
    named = re.findall(r"`([\w./-]+(?:\.py|\.json|\.md|/))`", text)
    linked = re.findall(r"\]\(([\w./-]+)\)", text)
    missing = {*named, *linked} - {"config.json"}  # a model's
    missing -= {name for name in missing for home in HOMES if (home / name).exists()}
    assert missing == set()


def test_speeds_of_replays_are_those_of_the_result() -> None:
    found = json.loads((ROOT / "bench/results/simulate-speed.json").read_text())["policies"]
    told = " ".join(TRACES.read_text().split())
    for calls in ("8 of 128, batch 1", "2 of 128, batch 1"):
        speeds = {name: row[calls]["demands_a_minute"]["median"] for name, row in found.items()}
        assert ", ".join(f"{v / 1e6:.0f} with `{name}`" for name, v in speeds.items()) in told
        if calls.startswith("8"):
            assert min(speeds["lru"], speeds["ewma"], speeds["auto"]) > 1e7


def test_tables_and_headlines_are_those_of_the_results() -> None:
    path = ROOT / "tools/readme_tables.py"
    spec = importlib.util.spec_from_file_location("readme_tables", path)
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    made = {
        "decode": tables.decode_table(),
        "device": tables.device_table(),
        "prefill": tables.prefill_table(),
        "vllm": tables.vllm_table(),
        "cards": tables.cards_table(),
        "load": tables.load_table(),
    }
    readme, policies = README.read_text(), POLICIES.read_text()
    assert tables.filled(readme, made) == readme
    assert tables.filled(policies, {"policies": tables.policy_tables()}) == policies
    head = " ".join(readme.split("## Try it")[0].split())
    decode = json.loads((ROOT / "bench/results/device-decode.json").read_text())["cases"]
    vllm = json.loads((ROOT / "bench/results/vllm-decode.json").read_text())["cases"]
    for said in (
        f"at {decode['device-6GiB-adv']['tokens_per_s']:.0f} tokens/s this way",
        f"gives {decode['auto-6GiB']['tokens_per_s']['median']:.2f}",
        f"takes {vllm['cache']['runs']['32 slots, batch 1']['ms']:.1f} ms a token",
        f"offload takes {vllm['uva']['runs']['uva, batch 1']['ms']:.1f}",
    ):
        assert said in head
