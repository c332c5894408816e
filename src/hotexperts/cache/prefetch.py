"""Copies for the next layer beside this one's compute, ended when that layer asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hotexperts.cache.device_mode import ChosenMode, check_options_for_kernels
from hotexperts.cache.packed_store import PackedBackingStore
from hotexperts.cache.store import ExpertStore
from hotexperts.config import CacheConfig
from hotexperts.formats import ExpertLayout
from hotexperts.kernels.gather import GatherLayout
from hotexperts.kernels.gather.ahead import NOBODY, AheadRows
from hotexperts.sizing import AHEAD_ROWS

NUM_PROGRAMS = 16  # of plans and prefetches: what brings a kernel's copies to their ceiling
NUM_UNPACKING = 32  # the same where they unpack
GUESSES_A_PAIR = 1.5  # experts that are looked at, for each that a token asks for


class PrefetchLane:
    """A side stream for guessed rows, and where they go; shared by the layers of one layout.

    A prefetch starts when a layer's own copies are done and runs while the link would be idle. The
    next plan tells it to end, and each of its programs waits for that, a block at most: so a wrong
    guess costs no more than that, and a right one is never waited for. On a CPU everything happens
    at once.

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
        self._last: torch.cuda.Event | None = None
        self._is_captured = False

    @property
    def nbytes(self) -> int:
        """Device bytes of the rows."""
        return self.ahead.buffer.nbytes

    def outlives(self, tensors: Sequence[torch.Tensor]) -> None:
        """Memory that a prefetch may still read or write when the tensors are dropped."""
        for tensor in tensors if self._stream is not None else ():
            tensor.record_stream(self._stream)

    def start(self, enqueue: Callable[[], None], *read: torch.Tensor) -> None:
        """Run `enqueue` under the side stream, after what the current stream has so far.

        Args:
            enqueue: launches what guesses and copies, or learns.
            read: what it reads of the current stream's.
        """
        if self._stream is None:
            enqueue()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self.outlives(read)
        with torch.cuda.stream(self._stream):
            enqueue()
            self._last = self._stream.record_event()
        self._is_captured = torch.cuda.is_current_stream_capturing()

    def join(self) -> None:
        """The current stream waits for the side stream: a capture ends with no stream apart.

        What ran before a capture began is over: `torch.cuda.graph` waits for the device.
        """
        last, self._last = self._last, None
        if last is None or self._is_captured != torch.cuda.is_current_stream_capturing():
            return
        torch.cuda.current_stream(self.ahead.words.device).wait_event(last)

    def clear(self) -> None:
        """Forget what came ahead, in stream order."""
        self.join()
        self.ahead.words.fill_(NOBODY)


def make_lanes(
    cache: CacheConfig, mode: ChosenMode, stores: Sequence[ExpertStore], device: torch.device
) -> dict[ExpertLayout, PrefetchLane]:
    """A lane for each layout, where prefetches are asked for.

    Raises:
        ConfigError: they are, and no kernel manages the caches.
    """
    if cache.prefetch == "off":
        return {}
    check_options_for_kernels(cache, mode)
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
