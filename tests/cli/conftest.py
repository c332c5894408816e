"""A tiny model with a tokenizer, and a way to run the command line inside the test."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hotexperts.cli.main import main

CHARACTERS = "".join(map(chr, range(ord(" "), ord("~") + 1)))  # 95, one less than the vocabulary


class Result(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1, "one object on one line"
        return json.loads(self.out)


Cli = Callable[..., Result]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    def call(*argv: object) -> Result:
        capfd.readouterr()
        status = main([str(arg) for arg in argv])
        return Result(status, *capfd.readouterr())

    return call


@pytest.fixture
def kernel_device() -> str:
    """Where Triton kernels run: on a GPU, or under the interpreter on the CPU."""
    pytest.importorskip("triton")
    import torch

    has_gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    return "cuda" if has_gpu else "cpu"


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs Transformers")
    from integrations import zoo

    folder = zoo.save_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"))
    save_tokenizer(folder)
    return folder


@pytest.fixture
def model_folder(saved_model: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(saved_model, tmp_path / "model"))


def save_tokenizer(folder: Path, *, chat_template: str | None = None) -> None:
    """One token a printable character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0} | {c: 1 + i for i, c in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(folder)
