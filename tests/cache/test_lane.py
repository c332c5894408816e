"""The lane's order where a GPU would run late: streams that only note what they wait for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hotexperts.cache import CPUBackingStore, StreamBanks
from hotexperts.cache.device import DeviceWeightProvider
from hotexperts.cache.transfer import CopyLane


class NotedStream:
    def __init__(self) -> None:
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, ValueError])
def test_a_call_that_breaks_off_leaves_no_copy_to_later_compute(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one that was enqueued right before an interrupt, which no event tells of."""
    lane = CopyLane(torch.device("cpu"))
    copies: list[Any] = [NotedStream(), NotedStream()]
    before, after = NotedStream(), NotedStream()
    current = iter([before, after, after])
    monkeypatch.setattr(lane, "_streams", copies)
    monkeypatch.setattr(lane, "_compute_stream", lambda: next(current))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(error), lane.ordered():
        raise error
    assert before.waited_for == copies
    assert after.waited_for == copies


@pytest.mark.interpret
def test_what_copies_for_the_next_layer_use_outlives_its_provider(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that fills banks ahead counts its copies, whoever was dropped meanwhile."""
    pytest.importorskip("triton")
    store = CPUBackingStore.from_tensors({"w": torch.zeros(6, 8)})
    banks = StreamBanks(store.layout, 2, torch.device("cpu"))
    kept: list[int] = []

    def keep(tensors: Any) -> None:
        kept.extend(tensor.untyped_storage().data_ptr() for tensor in tensors)

    monkeypatch.setattr(banks.lane, "outlives", keep)
    provider = DeviceWeightProvider(store, 2, device="cpu", banks=banks)
    assert provider.kernel.counters.data_ptr() in kept
    assert len(kept) == 3
