"""The documents' Python and commands run, options and files exist, the models are the zoo's."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import typer

import pages
import parallel_page
from hotexperts.cli.main import app, main
from readme_tables import filled

ROOT = Path(__file__).parent.parent
README, MODELS, TRACES = ROOT / "README.md", ROOT / "docs/models.md", ROOT / "docs/traces.md"
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/api").glob("*.md")])
DOCUMENTS = (README, ROOT / "CONTRIBUTING.md", *PAGES)
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
    ROOT / "docs/api",
    ROOT / "bench/results",
)
needs_transformers = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"), reason="needs Transformers"
)


def blocks(language: str) -> dict[str, str]:
    """Those of all documents, by document and first line."""
    return {
        f"{document.name}: {block.split(chr(10))[0][:50]}": block
        for document in DOCUMENTS
        for block in re.findall(rf"```{language}\n(.*?)```", document.read_text(), flags=re.DOTALL)
        if "base_url" not in block  # needs a server: tests/cli/test_serve.py
    }


@pytest.mark.transformers
@needs_transformers
@pytest.mark.parametrize("block", blocks("python").values(), ids=blocks("python"))
def test_python_blocks_run(
    block: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(README), "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.strip()


@pytest.mark.transformers
@needs_transformers
@pytest.mark.parametrize("block", blocks("console").values(), ids=blocks("console"))
def test_commands_run(
    block: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    commands = re.findall(r"^\$ hotexperts (.*)$", block, flags=re.MULTILINE)
    assert commands
    for command in commands:
        assert main(shlex.split(command)) == 0, capsys.readouterr().err
        assert capsys.readouterr().out.strip(), command


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
        "pack",
    )
    texts = "".join(document.read_text() for document in DOCUMENTS)
    used = re.findall(rf"hotexperts ({'|'.join(commands)})\b([^\n`]*)", texts)
    assert {command for command, _ in used} == set(commands)
    for command, rest in used:
        parameters = root.commands[command].params
        known = {name for p in parameters for name in (*p.opts, *p.secondary_opts)}
        ours, _, _ = rest.partition(" -- ")  # the rest is vLLM's
        assert set(re.findall(r"--[a-z-]+", ours)) <= known, (command, rest)


def test_the_page_on_serving_has_every_option_of_it() -> None:
    serve = typer.main.get_command(app).commands["serve"]
    options = {name for p in serve.params for name in p.opts if name.startswith("--")}
    page = (ROOT / "docs/serving.md").read_text()
    assert {name for name in options if f"`{name}" not in page} == {"--debug"}  # every command's


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
    missing = {*named, *linked} - {"config.json", "site/"}  # a model's; what make docs builds
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
    readme = README.read_text()
    for name, contents in pages.blocks().items():
        page = (ROOT / name).read_text()
        assert filled(page, contents) == page, "run python tools/pages.py"
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


def test_what_two_gpus_took_becomes_tables() -> None:
    name = "25.0% of slots, batch 1"
    ranks = [{"load_seconds": 20.4, "host": 14_500_000_000, "slots": 3_600_000_000}] * 2
    stalls = {
        "spread_us": {"median": 1.25, "p90": 30.0},
        "spread_after_attention_us": {"median": 0.5, "p90": 2.0},
        "departures_differ_us": {"p90": 0.8},
        "uneven_ms": 0.4,
        "uneven_ms_from_bytes": 0.35,
    }
    run = {"ms": 5.4, "hit_rate": 0.807, "missed_gb_by_rank": [0.17, 0.174], "times_one_gpu": 1.744}
    rates = {"alone": 54.2, "together": 27.1}
    made = parallel_page.content(
        {
            "command": "python bench/two_gpu.py",
            "machine": {"commit": "0123456789", "date": "2026-11-30T12:00:00"},
            "two_of_one": {"tp": {"start": 1.1, "load": 0.5, "host": 1.0}},
            "cases": {
                "link": {"gpus": [{"gpu": 0, "gb_s": {"copy_": rates}}]},
                "one": {"failed": 1},
                "tp": {
                    "start_seconds": 66.2,
                    "ranks": ranks,
                    "runs": {name: run | {"stamped_ms": 5.6, "stalls": stalls}},
                    "left_out": ["12.5% of slots, batch 1"],
                },
            },
        }
    )
    for line in (
        "`python bench/two_gpu.py`, commit 0123456, 2026-11-30.",
        "| GPU 0, copy engine | 54.2 | 27.1 |",
        "| tensor parallel | 66 s (1.10x) | 20 s (0.50x) | 29.00 GB (1.00x) | 3.60 GB |",
        f"| {name} | 5.40 ms (1.74x, 80.7 % hits, 0.174 GB a rank) |",
        f"| tensor parallel, {name} | 1.2, 30.0 us | 0.5, 2.0 us | 0.40 of 5.60 ms | 0.35 ms "
        "| 0.8 us |",
        "Not run: one GPU; expert parallel; tensor parallel, 12.5% of slots, batch 1.",
    ):
        assert line in made.split("\n"), line
