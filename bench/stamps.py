"""When each rank comes to an all-reduce and leaves it, and what the ranks' times say together.

A rank stamps its own clock before and after every all-reduce. Clocks of GPUs differ, so arrivals
are not compared with each other: all ranks leave an all-reduce together, so who waited longer came
earlier by the difference of the waits. What is wrong with that is seen in the same data: how much
the ranks' departures differ once the clocks' offset, the median of a step, is taken off.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

MOST_CALLS = 512  # all-reduces of a step
CLOCK_READS = 64
PERCENTILES = {"median": 50, "p90": 90, "max": 100}
Times = npt.NDArray[np.int64]


class Stamps:
    """Stamps the all-reduces of the tensor-parallel group in this process.

    Args:
        runner: vLLM's model runner. Graphs that it captures while `is_on` have stamps.

    Attributes:
        is_on: whether all-reduces that Python starts, or captures, are stamped.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        communicator = get_tp_group().device_communicator
        self.is_on = False
        self._num_calls = 0
        self._times = torch.zeros(2 * MOST_CALLS, dtype=torch.int64, device=runner.device)
        self._reduce = communicator.all_reduce
        communicator.all_reduce = self._all_reduce
        runner.get_model().register_forward_pre_hook(self._start)
        self._stamp(0)  # compiles

    def of_step(self) -> torch.Tensor:
        """A copy of the last step's, int64 `[calls, 2]`: before and after, in nanoseconds."""
        return self._times[: 2 * self._num_calls].view(-1, 2).clone()

    def clock_step_ns(self) -> int:
        """The smallest step that this device's clock makes."""
        if self._times.is_cuda:
            from clock_kernel import clock_kernel

            found = torch.zeros(CLOCK_READS, dtype=torch.int64, device=self._times.device)
            clock_kernel[(1,)](found, CLOCK_READS, num_warps=1)
            reads = found.cpu().numpy()
        else:
            reads = np.array([time.monotonic_ns() for _ in range(CLOCK_READS)])
        steps = np.diff(reads)
        return int(steps[steps > 0].min(initial=np.iinfo(np.int64).max))

    def _start(self, *_: Any) -> None:
        """Of a forward pass that Python runs; a replayed graph has its places already."""
        self._num_calls = 0

    def _all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.is_on:
            return self._reduce(tensor)
        place, self._num_calls = 2 * self._num_calls, self._num_calls + 1
        if self._num_calls > MOST_CALLS:
            raise RuntimeError(f"a step has more than {MOST_CALLS} all-reduces: raise MOST_CALLS")
        self._stamp(place)
        found = self._reduce(tensor)
        self._stamp(place + 1)
        return found

    def _stamp(self, place: int) -> None:
        if self._times.is_cuda:
            from clock_kernel import stamp_kernel

            stamp_kernel[(1,)](self._times, place, num_warps=1)
        else:
            self._times[place] = time.monotonic_ns()


def all_reduce_by() -> str:
    """What all-reduces of a decode step run on."""
    from vllm.distributed.parallel_state import get_tp_group

    communicator = get_tp_group().device_communicator
    custom = getattr(communicator, "ca_comm", None)
    if custom is not None and not custom.disabled:
        return "vLLM's custom all-reduce"
    return "NCCL" if getattr(communicator, "pynccl_comm", None) else type(communicator).__name__


def spreads(times: Times, moved: npt.NDArray[np.int64]) -> dict[str, Any]:
    """What ranks' stamps say of how they wait for each other.

    Args:
        times: `[ranks, steps, calls, 2]`, nanoseconds of each rank's own clock; the calls are one
            after the embedding, then two a layer: after attention and after the experts.
        moved: bytes that each layer copied in each step, `[ranks, steps, layers]`.

    Returns:
        Microseconds between the first and the last arrival at the all-reduce after the experts,
        and after attention, where nobody copies; milliseconds a step of their sum, and what of it
        even arrivals would have saved, `uneven_ms`; and, from the counters alone, by how much the
        rank that copied most in each layer was above the mean, `uneven_gb` a step.

    Raises:
        ValueError: other calls than described.
    """
    _, num_steps, num_calls, _ = times.shape
    if num_calls != 1 + 2 * moved.shape[2] or moved.shape[1] != num_steps:
        raise ValueError(
            f"{num_calls} all-reduces and {moved.shape[2]} layers with experts, "
            f"{num_steps} and {moved.shape[1]} steps: wanted one and two a layer, equal steps"
        )
    waits = (times[..., 1] - times[..., 0]) / 1e3
    between = waits.max(0) - waits.min(0)  # [steps, calls]
    experts, attention = between[:, 2::2], between[:, 1::2]
    mean_late = (waits - waits.min(0)).mean(0)[:, 2::2]  # how much before the last, on average
    uneven_nbytes = (moved.max(0) - moved.mean(0)).sum(1).mean()
    return {
        "spread_us": _percentiles(experts),
        "spread_after_attention_us": _percentiles(attention),
        "departures_differ_us": _percentiles(_departures(times)),
        "spread_ms_a_step": float(experts.sum(1).mean() / 1e3),
        "uneven_ms": float(mean_late.sum(1).mean() / 1e3),
        "uneven_gb": float(uneven_nbytes / 1e9),
        "step_ms": float(np.diff(times[:, :, 0, 1], axis=1).mean() / 1e6),
        "moved_gb_by_rank": (moved.sum(2).mean(1) / 1e9).tolist(),
    }


def _departures(times: Times) -> npt.NDArray[np.float64]:
    """Microseconds between ranks' departures, without their clocks' offset of each step."""
    left = (times[..., 1] - times[0, ..., 1]) / 1e3  # [ranks, steps, calls], of rank 0 zero
    found: npt.NDArray[np.float64] = np.abs(left - np.median(left, axis=2, keepdims=True))[1:]
    return found


def _percentiles(values: npt.NDArray[np.float64]) -> dict[str, float]:
    found = {name: float(np.percentile(values, at)) for name, at in PERCENTILES.items()}
    return found | {"mean": float(values.mean())}
