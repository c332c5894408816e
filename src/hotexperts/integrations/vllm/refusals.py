"""What an expert cache in vLLM does not work with: refused at start, by name, with the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotexperts.errors import ConfigError, UnsupportedModelError, UnsupportedOperationError
from hotexperts.integrations.vllm.budget import draft_nbytes
from hotexperts.integrations.vllm.compat import check_version
from hotexperts.integrations.vllm.options import ExpertCacheOptions, flag
from hotexperts.integrations.vllm.prefetching import check_prefetch
from hotexperts.simulate.trace import TraceError
from hotexperts.simulate.writer import check_out

ALL_TO_ALL = "allgather_reducescatter"  # gives global ids of experts, and a map of this rank's


def check_engine(config: Any, wanted: ExpertCacheOptions) -> None:
    """Check vLLM's finished configuration, before weights load.

    Args:
        config: vLLM's `VllmConfig`.
        wanted: what the user asked for.

    Raises:
        UnsupportedModelError: not an MoE model, or an unknown vLLM.
        ConfigError: more slots than experts, or an option that cannot take effect here.
        UnsupportedOperationError: a feature that would break the cache, or that the cache would
            break; the message names its flag.
    """
    check_version()
    model = config.model_config
    num_experts = model.get_num_experts()
    if not num_experts:
        raise UnsupportedModelError(
            f"{model.model} is not a Mixture-of-Experts model: run it without {flag('size')}"
        )
    size = wanted.cache.size
    num_local = num_experts // _expert_parallel_size(config)
    if isinstance(size, int) and size > num_local:
        raise ConfigError(
            f"{flag('size')} {size}: a layer has only {num_local} experts here: give at most "
            f"{num_local}, or 'auto'"
        )
    if not isinstance(size, int):
        draft_nbytes(config)  # or why it is not known
    _check_state(config, wanted.state)
    _check_ranks(config, wanted)
    _check_trace(config, wanted.trace)
    check_prefetch(config, wanted)
    if wanted.cache.packing == "packed12" and _device_type(config) == "cpu":
        raise ConfigError(
            f"{flag('options')}: packing is 'packed12', which kernels of a GPU unpack, and this "
            "engine is one for CPUs: use 'auto', or leave it out"
        )
    for name, remedy in _conflicts(config):
        raise UnsupportedOperationError(f"{name} does not work with {flag('size')}: {remedy}")


def _check_state(config: Any, state: str | None) -> None:
    if state is None:
        return
    if not Path(state).absolute().parent.is_dir():
        raise ConfigError(f"{flag('options')}: state is {state!r}, in a folder that is not there")
    if getattr(config.parallel_config, "distributed_executor_backend", None) == "ray":
        raise UnsupportedOperationError(
            f"{flag('options')}: state does not work with Ray, which kills its workers before "
            "they could save it; leave it out"
        )


def _check_ranks(config: Any, wanted: ExpertCacheOptions) -> None:
    parallel = config.parallel_config
    if not wanted.check_ranks:
        return
    if parallel.tensor_parallel_size == 1 or parallel.enable_expert_parallel:
        raise ConfigError(
            f"{flag('options')}: check_ranks compares ranks that have parts of the same experts: "
            "give --tensor-parallel-size above 1 without --enable-expert-parallel, or leave it out"
        )


def _check_trace(config: Any, trace: str | None) -> None:
    if trace is None:
        return
    try:
        check_out(trace)
    except TraceError as error:
        raise ConfigError(f"{flag('options')}: trace: {error}") from error
    parallel = config.parallel_config
    if getattr(parallel, "distributed_executor_backend", None) == "ray":
        raise UnsupportedOperationError(
            f"{flag('options')}: trace does not work with Ray, which kills its workers before "
            "they could write it; leave it out"
        )
    context_size = getattr(parallel, "prefill_context_parallel_size", 1)
    if parallel.data_parallel_size > 1 or context_size > 1:
        raise UnsupportedOperationError(
            f"{flag('options')}: trace does not work where ranks gather tokens of each other: "
            "record with --data-parallel-size 1 and --prefill-context-parallel-size 1"
        )


def _expert_parallel_size(config: Any) -> int:
    parallel = config.parallel_config
    if not parallel.enable_expert_parallel:
        return 1
    return parallel.tensor_parallel_size * parallel.data_parallel_size


def _conflicts(config: Any) -> Iterator[tuple[str, str]]:
    """Features in use that exclude a cache: name, remedy."""
    parallel, offload = config.parallel_config, config.offload_config
    if parallel.enable_eplb:
        yield "--enable-eplb", "it moves experts between ranks; leave it off"
    if parallel.use_ubatching:
        yield "--enable-dbo", "two threads would share one cache; leave it off"
    if getattr(parallel, "enable_elastic_ep", False):
        yield "--enable-elastic-ep", "it changes the experts of a rank; leave it off"
    if parallel.all2all_backend not in (None, ALL_TO_ALL):
        yield (
            f"--all2all-backend {parallel.all2all_backend}",
            f"it hands tokens out by numbers of its own or in batches; use {ALL_TO_ALL}",
        )
    if _is_compiled_for_a_cpu(config):
        yield "torch.compile on a CPU", "it would trace the cache's own code; give --enforce-eager"
    if config.lora_config is not None:
        yield "--enable-lora", "adapters on experts index them by themselves; merge the adapter"
    if config.model_config.enable_sleep_mode:
        yield "--enable-sleep-mode", "waking up would leave the slots without their experts"
    if offload is not None:
        yield from _offload_conflicts(offload)


def _is_compiled_for_a_cpu(config: Any) -> bool:
    """There MoE layers are no operators of their own, so that the compiler looks inside."""
    mode = getattr(getattr(config, "compilation_config", None), "mode", None)
    return _device_type(config) == "cpu" and bool(mode)


def _device_type(config: Any) -> str | None:
    return getattr(getattr(config, "device_config", None), "device_type", None)


def _offload_conflicts(offload: Any) -> Iterator[tuple[str, str]]:
    if offload.prefetch.offload_group_size:
        yield "--offload-group-size", "it would offload the slots; leave it off"
    params = set(offload.uva.cpu_offload_params or ())
    if offload.uva.cpu_offload_gb and (not params or any("expert" in p for p in params)):
        yield (
            "--cpu-offload-gb",
            "it would offload the slots; name other weights with --cpu-offload-params",
        )
