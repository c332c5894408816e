"""Compiles one kernel for a GPU and prints its loads and stores by kind, and its size: JSON.

python compiling.py '["plan", "fill" or "prefetch", POLICY, name of the first tensor's packing,
CAPABILITY]'
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from hotexperts.kernels.gather import codes
from hotexperts.kernels.gather.ahead import AheadRows
from hotexperts.kernels.gather.launch import BankFill
from hotexperts.kernels.gather.layout import GatherLayout
from hotexperts.kernels.gather.packed12 import Packed12
from hotexperts.kernels.gather.scaled import Scaled, by_row
from hotexperts.kernels.gather.triton import fill_bank_kernel
from hotexperts.kernels.plan.launch import PlanGather
from hotexperts.kernels.plan.layout import PlanLayout
from hotexperts.kernels.plan.triton import plan_gather_kernel
from hotexperts.kernels.prefetch.launch import Prefetch
from hotexperts.kernels.prefetch.triton import prefetch_kernel

LONG = ("counters", "copies", "ahead_counters")
SCALARS = ("num_ids", "top_k", "max_bypassed", "evict", "num_waves", "first")
SCALARS += ("num_tokens", "before", "layer")


def compiled(kernel, constants, capability):
    options = {n: constants.pop(n) for n in ("num_warps", "enable_fp_fusion") if n in constants}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else "*i32" for n in names}
    signature |= {n: "i32" for n in names if n in SCALARS}
    signature |= {n: "*i64" for n in names if n in LONG}
    signature |= {n: "*fp32" for n in names if n in ("powers", "scores", "switch")}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(n),): value for n, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"},
    )
    found = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    words = re.findall(r"((?:ld|st|atom)(?:\.volatile)?\.global[\w.]*\.[bu]\d+)", found.asm["ptx"])
    return Counter(words), len(found.asm["cubin"])


PACKINGS = {
    "plain": None,
    "packed12": Packed12(108, 16),
    "int4": by_row(codes.INT4, (128, 128), 32, 16, torch.bfloat16),
    "int8": by_row(codes.INT8, (128, 128), 128, 16, torch.bfloat16),
    "fp8": Scaled(codes.E4M3, 128, 128, 128, 128, 32, torch.bfloat16),
    "mxfp4": Scaled(codes.E2M1, 128, 128, 32, 1, 8, torch.bfloat16),
    "gptq": Scaled(codes.INT4, 128, 128, 1, 128, 16, torch.float16, True),
    "awq": Scaled(codes.INT4, 128, 128, 1, 128, 16, torch.bfloat16, True, True),
}
name, policy, packing, capability = json.loads(sys.argv[1])
rows, num_rows = torch.zeros(8, 64, dtype=torch.int32), 4
packings = (PACKINGS[packing], None)
gather = GatherLayout.of((0, 32768), (32768, 8192), 65536, num_rows, packings)
ahead = AheadRows.of(gather, num_rows, 16, rows.device)
plan = PlanGather(
    PlanLayout(8, num_rows, policy), gather, rows, gather.buffer(rows.device), ahead=ahead
)
launch, kernel = plan, plan_gather_kernel
if name == "fill":
    launch, kernel = BankFill(plan, gather, num_rows, rows), fill_bank_kernel
if name == "prefetch":
    launch, kernel = Prefetch(plan, ahead, gather, rows), prefetch_kernel
constants = dict(launch._constants)
if name == "prefetch":
    constants |= {"NUM_GUESSES": 4, "HAS_NUM_VALID": True}
if name == "plan":
    constants |= {"HAS_NUM_VALID": True, "HAS_COUNTS": False, "BLOCK_N": 8}
print(json.dumps(compiled(kernel, constants, capability)))
