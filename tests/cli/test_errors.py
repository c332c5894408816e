from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cli.conftest import Cli, Result
from hotexperts import demo

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]

CPU = ("--device", "cpu", "--max-new-tokens", 4)
REPOSITORY = "hotexperts.integrations.transformers.repository"
DEVICE = ("--cache-mode", "device")
COMMANDS = pytest.mark.parametrize(
    "command", [("run", "--prompt", "x"), ("verify",)], ids=["run", "verify"]
)


def assert_one_line(result: Result, message: str) -> None:
    assert (result.status, result.out) == (2, ""), result
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert message in result.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give --prompt TEXT or --interactive\n"),
        (["--prompt", "x", "--interactive"], "give --prompt TEXT or --interactive, not both"),
        (["--interactive", "--json"], "--json prints one object: use it with --prompt"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x", "--expert-cache-size", "0"], "at least 1 slot"),
        (["--prompt", "x", "--expert-cache-size", "-3"], "at least 1 slot"),
        (["--prompt", "x", "--expert-cache-size", "9"], "9, but a layer has only 8 experts"),
        (["--prompt", "x", "--expert-cache-size", "6 parsecs"], "unknown unit 'parsecs'"),
        (["--prompt", "x", "--expert-cache-size", "10KiB"], "a GPU budget of 10 KiB holds 0"),
        (["--prompt", "x", "--expert-cache-gib", "0"], "give more than 0"),
        (["--prompt", "x", "--expert-cache-gib", "nan"], "give more than 0"),
        (
            ["--prompt", "x", "--expert-cache-gib", "1", "--expert-cache-size", "2"],
            "--expert-cache-size or --expert-cache-gib, not both",
        ),
        (
            ["--prompt", "x", "--policy", "belady"],
            "policy 'belady' is a bound, which knows the future",
        ),
        (["--prompt", "x", "--policy", "nowhere:Best"], "fifo, "),
        (["--prompt", "x", "--device", "tpu9"], "device 'tpu9'"),
        (["--prompt", "x", "--chat"], "has no chat template"),
        (["--prompt", "x", "--context", "4"], "raise --context, at most 128"),
        (["--prompt", "x" * 128], "it is all the model has: give a shorter prompt"),
        (["--prompt", "x", "--max-new-tokens", "5000"], "give --max-new-tokens 127 or less\n"),
        (["--prompt", "x", "--context", "129"], "the model has 128 positions: give at most 128"),
        (["--prompt", "x", "--max-new-tokens", "128"], "more than the context of 128"),
        (["--prompt", "x", "--expert-cache-gib", "1e300"], "more than any GPU has"),
        (["--prompt", "x", "--expert-cache-size", "9" * 5000], "has 5000 characters"),
        (["--prompt", "x", "--seed", str(2**64)], "--seed does not fit 64 bits"),
        (["--prompt", "x", "--temperature", "1e-30"], "give 0 for the likeliest token, or at"),
        (["--prompt", "x", "--temperature", "inf"], "give 0 for the likeliest token, or at"),
        (["--prompt", "caf\udce9"], "--prompt is not valid UTF-8 (character 3)"),
        (["--prompt", "x", "--policy", "hotexperts.policy.base:Policy"], "is abstract"),
        (["--prompt", "x", *DEVICE, "--policy", "slru"], "policy 'slru' has no kernel"),
    ],
    ids=lambda value: ascii(" ".join(value))[:60] if isinstance(value, list) else "",
)
def test_bad_options_of_run(argv: list[str], message: str, saved_model: Path, cli: Cli) -> None:
    assert_one_line(cli("run", saved_model, *CPU[2:], *argv), message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--expert-cache-size", "1,0"], "at least 1 slot"),
        (["--expert-cache-size", ""], "--expert-cache-size is empty: list 16,32, or"),
        (["--expert-cache-size", ","], "--expert-cache-size is empty: list 16,32, or"),
        (["--expert-cache-size", "2,9"], "9, but a layer has only 8 experts"),
        (["--policy", "belady"], "policy 'belady' is a bound, which knows the future"),
        (["--expert-cache-size", "2,20KiB"], "a GPU budget of 20 KiB holds 0"),
        (["--tokens", "100000"], "the model's 128 positions: give --tokens 96 or less"),
        (["--prompt", "x" * 128], "the model's 128 positions: give a shorter prompt"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "caf\udce9"], "--prompt is not valid UTF-8 (character 3)"),
    ],
    ids=lambda value: ascii(" ".join(value))[:60] if isinstance(value, list) else "",
)
def test_bad_options_of_verify(
    argv: list[str],
    message: str,
    saved_model: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hotexperts.cli.compare._resident", None)  # the long part
    assert_one_line(cli("verify", saved_model, "--device", "cpu", *argv), message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policy", "slru"], "policy 'slru' has no kernel"),
        ([], "cache_mode 'device' cannot work here, no CUDA device: give one instead of cpu"),
    ],
)
def test_verify_refuses_a_mode_before_the_resident_model_is_loaded(
    argv: list[str], message: str, saved_model: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr("hotexperts.cli.compare._resident", None)
    assert_one_line(cli("verify", saved_model, "--device", "cpu", *DEVICE, *argv), message)


@COMMANDS
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--cache-mode", "gpu"), "cache_mode is 'gpu': use 'auto', 'host' or 'device'"),
        ((*DEVICE, "--expert-store", "file"), "use expert_store 'ram'"),
    ],
)
def test_a_mode_that_means_nothing_is_refused_before_the_model_is_looked_for(
    command: tuple[str, ...], argv: tuple[str, ...], message: str, tmp_path: Path, cli: Cli
) -> None:
    assert_one_line(cli(*command, tmp_path / "nowhere", *argv), message)


@COMMANDS
class TestBadCheckpoints:
    @pytest.fixture(autouse=True)
    def _command(self, command: tuple[str, ...], cli: Cli) -> None:
        self.call = lambda folder: cli(*command, folder, "--device", "cpu")

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        assert_one_line(self.call(tmp_path / "nowhere"), "no such folder")

    def test_a_name_that_the_hub_is_not_there_to_know(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []

        def ask(url: str, **options: Any) -> None:
            asked.append(url)
            raise ConnectionError("no network\nat all")

        monkeypatch.setattr(f"{REPOSITORY}.get_hf_file_metadata", ask)
        assert_one_line(
            self.call("nosuchmodel"),
            "nosuchmodel: no such folder here, and the hub cannot be reached to look for a model "
            "of that name (no network): mend the path or the network ",
        )
        assert len(asked) == 1, "no second try, which would wait"

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        assert_one_line(self.call(tmp_path), f"{tmp_path}: holds no config.json: give the folder")

    def test_no_weights(self, model_folder: Path) -> None:
        for file in model_folder.glob("*.safetensors*"):
            file.unlink()
        message = f"error: {model_folder}: has a configuration but holds no weights: give a folder"
        assert_one_line(self.call(model_folder), message)

    def test_a_model_of_another_kind(self, model_folder: Path) -> None:
        transformers.SwitchTransformersConfig().save_pretrained(model_folder)
        assert_one_line(
            self.call(model_folder), "AutoModelForCausalLM loads no switch_transformers"
        )

    def test_a_file(self, model_folder: Path) -> None:
        assert_one_line(self.call(model_folder / "config.json"), "give the folder")

    def test_not_a_mixture_of_experts(self, model_folder: Path) -> None:
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        transformers.LlamaForCausalLM(config).save_pretrained(model_folder)
        assert_one_line(self.call(model_folder), "LlamaForCausalLM has no experts")

    def test_a_truncated_file(self, model_folder: Path) -> None:
        shard = sorted(model_folder.glob("*.safetensors"))[3]
        shard.write_bytes(shard.read_bytes()[:-50])
        assert_one_line(self.call(model_folder), "truncated")

    def test_pickle_is_never_read(self, model_folder: Path) -> None:
        for file in model_folder.glob("*.safetensors*"):
            file.unlink()
        torch.save({}, model_folder / "pytorch_model.bin")
        assert_one_line(self.call(model_folder), "safetensors")

    def test_code_of_the_checkpoint_is_not_run(self, model_folder: Path) -> None:
        file = model_folder / "config.json"
        auto_map = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
        changed = {"model_type": "theirs", "auto_map": auto_map}
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
        (model_folder / "theirs.py").write_text("raise AssertionError('it ran')")
        assert_one_line(self.call(model_folder), "contains custom code")


def test_a_model_without_tokenizer(model_folder: Path, cli: Cli) -> None:
    for file in model_folder.glob("tokenizer*"):
        file.unlink()
    result = cli("run", model_folder, "--prompt", "x", *CPU)
    assert_one_line(result, "no tokenizer could be loaded")
    assert result.err.endswith(
        "its files (tokenizer.json, tokenizer_config.json) must be with the weights: "
        "download them too\n"
    )


def test_no_model_and_none_in_the_package(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "FOLDER", Path("no_such_folder"))
    assert_one_line(cli("run", "--prompt", "x"), "give a folder or a hub id")


def test_out_of_memory_names_the_knob(
    saved_model: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("hotexperts.cli.opened.load", load)
    result = cli("run", saved_model, "--prompt", "x", *CPU)
    assert_one_line(result, "lower --expert-cache-size, or use --device cpu")


def test_debug_shows_the_traceback_and_keeps_the_status(tmp_path: Path, cli: Cli) -> None:
    result = cli("verify", tmp_path / "nowhere", "--debug")
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("Traceback (most recent call last)")
    assert "in model_path" in result.err
    assert f"error: {tmp_path / 'nowhere'}: no such folder: " in result.err.splitlines()[-1]


def test_a_bug_is_no_line(saved_model: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotexperts.cli.opened.load", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli("run", saved_model, "--prompt", "x", *CPU)
