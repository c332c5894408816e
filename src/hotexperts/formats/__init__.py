"""How one expert lies in memory."""

from hotexperts.formats.layout import ROW_ALIGNMENT_BYTES, ExpertLayout, TensorSpec

__all__ = ["ROW_ALIGNMENT_BYTES", "ExpertLayout", "TensorSpec"]
