"""Gather: copy experts' rows from page-locked host memory into slot tensors, on the device."""

from hotexperts.kernels.gather.layout import GatherLayout

__all__ = ["GatherLayout"]
