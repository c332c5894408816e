"""vLLM forks its workers: who asks for a GPU before that leaves them without one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
PARENT = """
import sys, traceback
import torch

def watch(name):
    ask = getattr(torch.cuda, name)
    def watched(*args, **kwargs):
        frames = [f.filename for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
        if "/hotexperts/" in frames[-1]:  # vLLM itself asks in a way that leaves forks be
            sys.exit(f"{frames[-1]}: torch.cuda.{name} asks for a GPU")
        return ask(*args, **kwargs)
    setattr(torch.cuda, name, watched)

for name in ("is_available", "device_count", "get_device_properties", "_lazy_init"):
    watch(name)
from vllm.platforms import current_platform
current_platform.device_type  # loads the plug-in
from vllm.engine.arg_utils import EngineArgs
config = EngineArgs(sys.argv[1], moe_expert_cache_size=8, enforce_eager=True).create_engine_config()
assert config.additional_config, "the plug-in was not asked"
"""


def test_the_parent_of_workers_asks_for_no_gpu(checkpoint: Callable[[str], Path]) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PARENT, str(checkpoint("qwen3"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
