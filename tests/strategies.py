"""Shared hypothesis strategies: caches and the calls that come to them."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def cache_shapes(draw: st.DrawFn) -> tuple[int, int]:
    """(num_experts, capacity), odd sizes and both ends included."""
    num_experts = draw(st.integers(1, 12))
    return num_experts, draw(st.integers(1, num_experts))


def demands(num_experts: int) -> st.SearchStrategy[dict[int, int]]:
    """Distinct experts with their token counts, possibly none."""
    return st.dictionaries(st.integers(0, num_experts - 1), st.integers(1, 5))
