"""Triton launches on the current device, whatever device its arguments are on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, launches go to this device and its current stream; a CPU changes nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
