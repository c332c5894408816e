"""Markers that need something the machine may lack, and a device that stands in for a GPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


# Before Triton is imported: without a GPU its kernels run under the interpreter.
if not _has_cuda():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci")


# Modules that import Transformers at their top cannot be collected without it.
collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["integrations/*.py"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in ("gpu", "vllm_gpu"):
        if item.get_closest_marker(marker) and not _has_cuda():
            pytest.skip("needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the slots live: the CPU stands in for a GPU everywhere, and CUDA runs where it is."""
    return str(request.param)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch on one thread: models as small as the tests' only wait for more of them."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
