"""The tests of vLLM PR #37190 by their names, restated for these classes, and its porter's trap."""

from __future__ import annotations

import pytest
import torch

from hotexperts.cache import (
    CachedWeightProvider,
    CPUBackingStore,
    ExpertCacheOverflow,
    FullGPUProvider,
)

NUM_EXPERTS, HIDDEN, WIDTH = 8, 6, 4


def make_weights(
    dtype: torch.dtype = torch.bfloat16, *, scales: bool = False
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {
        "w13": torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, generator=generator).to(dtype),
        "w2": torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, generator=generator).to(dtype),
    }
    if scales:
        weights["w13_scale"] = torch.rand(NUM_EXPERTS, 2, generator=generator)
        weights["w2_scale"] = torch.rand(NUM_EXPERTS, generator=generator)
    return weights


def make_provider(
    capacity: int, device: str = "cpu", weights: dict[str, torch.Tensor] | None = None
) -> CachedWeightProvider:
    store = CPUBackingStore.from_tensors(weights or make_weights(), pin=device == "cuda")
    return CachedWeightProvider(store, capacity, policy="lru", device=device)


def ids(*experts: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor([experts], device=device)


def test_hit_miss_counters(device: str) -> None:
    provider = make_provider(4, device)
    provider.prepare(ids(0, 1, device=device))
    provider.prepare(ids(1, 2, device=device))
    provider.prepare(ids(2, 2, device=device))  # one distinct expert counts once
    assert (provider.stats.hits, provider.stats.misses) == (2, 3)
    assert provider.stats.bytes_moved == 3 * provider.store.layout.nbytes


def test_lru_eviction_order() -> None:
    provider = make_provider(2)
    for expert in (0, 1, 0, 2):  # 1 is the oldest when 2 comes
        provider.prepare(ids(expert))
    assert sorted(provider.slots.residency.residents) == [0, 2]
    provider.prepare(ids(3))  # now 0 is
    assert sorted(provider.slots.residency.residents) == [2, 3]


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_remapping_matches_internal_dict(device: str, id_dtype: torch.dtype) -> None:
    provider = make_provider(5, device)
    topk_ids = torch.tensor([[7, 1], [3, 7], [-1, 5]], dtype=id_dtype, device=device)
    remapped = provider.prepare(topk_ids).topk_ids
    assert remapped.dtype == id_dtype
    assert remapped.device == topk_ids.device
    slot_of = [*provider.slots.slot_of, -1]
    expected = [[slot_of[e] for e in row] for row in topk_ids.tolist()]
    assert remapped.tolist() == expected
    assert remapped[2, 0] == -1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_output_dtype_matches_input(dtype: torch.dtype) -> None:
    provider = make_provider(4, weights=make_weights(dtype))
    result = provider.prepare(ids(0, 3))
    hidden = torch.randn(HIDDEN).to(dtype)
    assert result.tensors.w13.dtype == dtype
    assert (result.tensors.w13[result.topk_ids[0, 0]] @ hidden).dtype == dtype


def test_gpu_buffer_matches_source_weights(device: str) -> None:
    weights = make_weights()
    provider = make_provider(4, device, weights)
    result = provider.prepare(ids(6, 2, 5, device=device))
    for slot, expert in zip(result.topk_ids[0].tolist(), (6, 2, 5), strict=True):
        for name, source in weights.items():
            assert torch.equal(getattr(result.tensors, name)[slot].cpu(), source[expert])


def test_gpu_buffer_correct_after_eviction(device: str) -> None:
    weights = make_weights()
    provider = make_provider(2, device, weights)
    for expert in (0, 1, 2, 3, 0):
        result = provider.prepare(ids(expert, device=device))
        slot = int(result.topk_ids)
        assert torch.equal(result.tensors.w13[slot].cpu(), weights["w13"][expert])
        assert torch.equal(result.tensors.w2[slot].cpu(), weights["w2"][expert])


def test_cpu_backing_is_pinned() -> None:
    if not torch.cuda.is_available():
        pytest.skip("page-locking needs CUDA")
    store = CPUBackingStore.from_tensors(make_weights(), pin=True)
    assert store.rows.is_pinned()


def test_scale_buffers_allocated() -> None:
    tensors = make_provider(3, weights=make_weights(scales=True)).slots.tensors
    assert tensors.w13_scale.shape == (3, 2)
    assert tensors.w2_scale.shape == (3,)


def test_no_scales_when_not_provided() -> None:
    assert make_provider(3).slots.tensors._fields == ("w13", "w2")


def test_scale_copied_with_weights() -> None:
    weights = make_weights(scales=True)
    result = make_provider(3, weights=weights).prepare(ids(6))
    slot = int(result.topk_ids)
    assert torch.equal(result.tensors.w13_scale[slot], weights["w13_scale"][6])
    assert result.tensors.w2_scale[slot] == weights["w2_scale"][6]


def test_scale_updated_after_eviction() -> None:
    weights = make_weights(scales=True)
    provider = make_provider(1, weights=weights)
    provider.prepare(ids(6))
    result = provider.prepare(ids(2))
    assert torch.equal(result.tensors.w13_scale[0], weights["w13_scale"][2])


def test_overflow_raises() -> None:
    provider = make_provider(2)
    provider.prepare(ids(0, 1))
    with pytest.raises(ExpertCacheOverflow, match="3 distinct experts needed in one call, 2 slots"):
        provider.prepare(ids(1, 2, 3))
    assert sorted(provider.slots.residency.residents) == [0, 1]  # nothing has changed
    assert provider.stats.calls == 1


def test_no_overflow_at_capacity() -> None:
    provider = make_provider(3)
    provider.prepare(ids(5, 6, 7, 7))
    assert provider.stats.misses == 3


def test_cache_size_equals_num_experts() -> None:
    provider = make_provider(NUM_EXPERTS)
    provider.prepare(torch.arange(NUM_EXPERTS))
    provider.prepare(torch.arange(NUM_EXPERTS))
    assert (provider.stats.misses, provider.stats.hits) == (NUM_EXPERTS, NUM_EXPERTS)
    assert provider.stats.evictions == 0


def test_cache_size_one_max_eviction() -> None:
    provider = make_provider(1)
    for expert in range(NUM_EXPERTS):
        provider.prepare(ids(expert))
    assert provider.stats.evictions == NUM_EXPERTS - 1


def test_result_contains_buffer_references(device: str) -> None:
    provider = make_provider(3, device)
    addresses = [tensor.data_ptr() for tensor in provider.slots.tensors]
    for expert in range(NUM_EXPERTS):
        result = provider.prepare(ids(expert, device=device))
        assert [tensor.data_ptr() for tensor in result.tensors] == addresses


def test_an_expert_that_the_same_call_still_needs_is_not_evicted() -> None:
    """The trap: 0 is the oldest, and the call that misses on 2 needs 0 as well."""
    weights = make_weights()
    provider = make_provider(2, weights=weights)
    provider.prepare(ids(0))
    provider.prepare(ids(1))
    result = provider.prepare(ids(2, 0))
    for slot, expert in zip(result.topk_ids[0].tolist(), (2, 0), strict=True):
        assert torch.equal(result.tensors.w13[slot], weights["w13"][expert])


def test_a_full_provider_gives_what_it_was_given() -> None:
    group = CPUBackingStore.from_tensors(make_weights()).tensors
    provider, topk_ids = FullGPUProvider(group), ids(1, 2)
    result = provider.prepare(topk_ids)
    assert result.topk_ids is topk_ids
    assert result.tensors is group
    assert [wave.topk_ids is topk_ids for wave in provider.waves(topk_ids)] == [True]
