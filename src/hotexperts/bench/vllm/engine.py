"""An engine of vLLM in this process, its model of random weights.

The first engine of a process sets vLLM up for all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotexperts.bench.vllm.model import Model
from hotexperts.bench.vllm.weights import random_weights

ENVIRONMENT = {  # before vLLM is imported
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for results
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "seed": 0,
    "enable_prefix_caching": False,
}


class Engine(Model):
    """One `LLM` on random weights.

    Args:
        folder: for the model's configuration, which is all that is written.
        shape: the configuration.
        options: of `LLM`; `moe_expert_cache_size` asks for a cache.
    """

    def __init__(self, folder: Path, shape: Mapping[str, Any], **options: Any) -> None:
        from hotexperts.integrations.vllm.plugin import register

        os.environ |= ENVIRONMENT
        register()  # also where the package is not installed, and vLLM finds no plug-in of ours
        from vllm import LLM

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dict(shape)))
        with random_weights():
            self.llm = LLM(str(folder), **OPTIONS | options)
        core = self.llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        super().__init__(self.llm.llm_engine.vllm_config, runner)
