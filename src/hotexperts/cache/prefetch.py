"""Copies for the next layer beside this one's compute, ended when that layer asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hotexperts.cache.device_mode import ChosenMode
from hotexperts.cache.packed_store import PackedBackingStore
from hotexperts.cache.store import ExpertStore
from hotexperts.config import CacheConfig
from hotexperts.errors import ConfigError
from hotexperts.formats import ExpertLayout
from hotexperts.kernels.gather import GatherLayout
from hotexperts.kernels.gather.ahead import AheadRows

NUM_PROGRAMS = 16  # of plans and prefetches: what brings a kernel's copies to their ceiling
NUM_UNPACKING = 32  # the same where they unpack
AHEAD_ROWS = 2  # a layer's compute hides the copy of one or two experts


class PrefetchLane:
    """A side stream for guessed rows, and where they go; shared by the layers of one layout.

    A prefetch starts when a layer's own copies are done and runs while the link would be idle. The
    next plan tells it to end and waits for that, a block of each program at most: so a wrong guess
    costs no more than that, and a right one is never waited for. On a CPU everything happens at
    once.

    Args:
        layout: what a row holds.
        num_programs: of plans and prefetches.
        device: where the slots are.
    """

    def __init__(self, layout: ExpertLayout, num_programs: int, device: torch.device) -> None:
        sizes = tuple(spec.nbytes for spec in layout.specs)
        rows = GatherLayout.of(layout.offsets, sizes, layout.row_nbytes, AHEAD_ROWS)
        self.layout = layout
        self.ahead = AheadRows.of(rows, AHEAD_ROWS, num_programs, device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ends: torch.cuda.Event | None = None
        self._is_captured = False

    @property
    def nbytes(self) -> int:
        """Device bytes of the rows."""
        return self.ahead.buffer.nbytes

    def outlives(self, tensors: Sequence[torch.Tensor]) -> None:
        """Memory that a prefetch may still read or write when the tensors are dropped."""
        for tensor in tensors if self._stream is not None else ():
            tensor.record_stream(self._stream)

    def start(self, enqueue: Callable[[], None], read: torch.Tensor) -> None:
        """Run `enqueue` under the side stream, after what the current stream has so far.

        Args:
            enqueue: launches what guesses and copies.
            read: what it reads of the current stream's.
        """
        if self._stream is None:
            enqueue()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        read.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            enqueue()
            self._ends = self._stream.record_event()
        self._is_captured = torch.cuda.is_current_stream_capturing()

    def finish(self) -> None:
        """End the copies that run, in stream order; the next plan lets others run again.

        What ran before a capture began is over: `torch.cuda.graph` waits for the device.
        """
        ends, self._ends = self._ends, None
        if ends is None or self._is_captured != torch.cuda.is_current_stream_capturing():
            return
        self.ahead.words[:1].fill_(1)
        torch.cuda.current_stream(self.ahead.words.device).wait_event(ends)

    def clear(self) -> None:
        """End the copies that run and forget what they brought."""
        self.finish()
        self.ahead.words.fill_(-1)
        self.ahead.words[:1].zero_()


def make_lanes(
    cache: CacheConfig, mode: ChosenMode, stores: Sequence[ExpertStore], device: torch.device
) -> dict[ExpertLayout, PrefetchLane]:
    """A lane for each layout, where prefetches are asked for.

    Raises:
        ConfigError: they are, and no kernel manages the caches.
    """
    if cache.prefetch == "off":
        return {}
    if mode.mode != "device":
        raise ConfigError(
            f"prefetch {cache.prefetch!r} runs in kernels, which do not work here "
            f"({mode.reason or 'cache_mode host'}): use prefetch 'off'"
        )
    layouts = dict.fromkeys(store.layout for store in stores)
    return {
        layout: PrefetchLane(
            layout, num_programs_for([s for s in stores if s.layout == layout]), device
        )
        for layout in layouts
    }


def num_programs_for(stores: Sequence[ExpertStore]) -> int:
    """Of kernels that copy out of any of these."""
    packed = [store for store in stores if isinstance(store, PackedBackingStore)]
    is_packed = any(store.form.is_packed for store in packed)
    return NUM_UNPACKING if is_packed else NUM_PROGRAMS
