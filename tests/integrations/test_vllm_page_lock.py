"""In vLLM kernels read the experts, so that a refused page-lock stops the program."""

from __future__ import annotations

import pytest
import torch

from fake_cudart import FakeRuntime
from hotexperts.config import CacheConfig
from hotexperts.errors import HostMemoryError
from hotexperts.integrations.vllm.stores import store_of


@pytest.mark.parametrize("packing", ["none", "packed12"])
def test_the_refusal_names_the_option_and_what_to_do(
    packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = FakeRuntime(num_granted=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    cache = CacheConfig(2, packing=packing)
    tensors = {"w13_weight": torch.randn(4, 32, 64, dtype=torch.bfloat16)}
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **how: self)  # there is no GPU
    wanted = (
        r"^--moe-expert-cache-size needs page-locked memory, and page-locking .* was refused "
        r"\(CUDA error 2; .*\): raise the limit \(.*\), or leave the cache off$"
    )
    with pytest.raises(HostMemoryError, match=wanted):
        store_of(cache, tensors, torch.device("cuda"), None, capacity=2)
    assert runtime.last_error == 0
