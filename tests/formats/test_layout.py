from __future__ import annotations

import pytest
import torch

from hotexperts.errors import UnsupportedModelError
from hotexperts.formats import ROW_ALIGNMENT_BYTES, ExpertLayout, TensorSpec

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.int32,
]


def test_tensors_begin_at_256_byte_boundaries() -> None:
    layout = ExpertLayout(
        (
            TensorSpec("w", (3, 5), torch.bfloat16),  # 30 bytes
            TensorSpec("scale", (), torch.float32),  # one number an expert
            TensorSpec("bias", (130,), torch.float16),  # 260 bytes
        )
    )
    assert layout.offsets == (0, 256, 512)
    assert layout.row_nbytes == 512 + 512
    assert layout.nbytes == 30 + 4 + 260


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_views_read_back_what_was_written(dtype: torch.dtype, num_rows: int) -> None:
    layout = ExpertLayout((TensorSpec("a", (2, 3), dtype), TensorSpec("b", (), dtype)))
    rows = torch.zeros(num_rows, layout.row_nbytes, dtype=torch.uint8)
    views = layout.views(rows)
    source = torch.arange(num_rows * 7).view(num_rows, 7) % 11  # exact in every dtype
    views.a.copy_(source[:, :6].reshape(num_rows, 2, 3).to(dtype))
    views.b.copy_(source[:, 6].to(dtype))
    again = layout.views(rows)
    assert torch.equal(again.a.to(torch.float32).view(num_rows, 6).int(), source[:, :6].int())
    assert torch.equal(again.b.to(torch.float32).int(), source[:, 6].int())
    assert rows[0, 6 * dtype.itemsize : ROW_ALIGNMENT_BYTES].sum() == 0  # padding untouched


def test_a_tensor_without_an_expert_dimension_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'scale' has no expert dimension"):
        ExpertLayout.of({"w": torch.zeros(4, 2), "scale": torch.tensor(1.0)})
    with pytest.raises(UnsupportedModelError, match=r"sizes differ: {'w': 4, 'scale': 3}"):
        ExpertLayout.of({"w": torch.zeros(4, 2), "scale": torch.zeros(3)})
    with pytest.raises(UnsupportedModelError, match="without tensors"):
        ExpertLayout.of({})


def test_a_name_that_no_attribute_can_have_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'w\.1'"):
        ExpertLayout.of({"w.1": torch.zeros(4, 2)})


def test_slots_are_contiguous_tensors_in_one_aligned_buffer() -> None:
    specs = TensorSpec("a", (2, 3), torch.float16), TensorSpec("b", (), torch.float32)
    buffer, tensors = ExpertLayout(specs).allocate(50, torch.device("cpu"))
    assert buffer.dtype == torch.uint8
    assert buffer.numel() == 768 + 256  # 600 and 200 bytes
    assert [t.data_ptr() - buffer.data_ptr() for t in tensors] == [0, 768]
    assert tensors.a.shape == (50, 2, 3)
    assert tensors.b.shape == (50,)
    assert (tensors.a.dtype, tensors.b.dtype) == (torch.float16, torch.float32)
    assert all(t.is_contiguous() for t in tensors)
