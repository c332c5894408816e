"""The switch's device code by itself."""

import triton

from hotexperts.kernels.prefetch.judge import record_switch


@triton.jit(do_not_specialize=["num_issued", "num_used"])
def judge_kernel(at, num_issued, num_used):
    record_switch(at, num_issued, num_used)
