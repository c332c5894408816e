"""Whether a layer's guesses are copied: the words that its plan writes and its prefetch reads."""

from __future__ import annotations

import enum

import torch

from hotexperts.predict import control


class Switch(enum.IntEnum):
    """Places in a layer's float32 switch."""

    IS_ON = 0
    PAYOFF = 1
    TRIAL = 2
    REST = 3
    NEXT_REST = 4


def fresh_switch(device: torch.device) -> torch.Tensor:
    """As `control.Layer` begins."""
    layer = control.Layer()
    words = [layer.is_on, layer.payoff, layer.trial, layer.rest, layer.next_rest]
    return torch.tensor([float(word) for word in words], device=device)
