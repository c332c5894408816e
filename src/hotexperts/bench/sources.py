"""Where the model of a benchmark comes from: a checkpoint, or a shape with random weights."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from hotexperts.bench.decode import Show
from hotexperts.bench.random_model import model_without_weights, random_model
from hotexperts.bench.replay import Replay
from hotexperts.bench.routing import Routing
from hotexperts.bench.rows import name_of
from hotexperts.bench.shapes import Shape
from hotexperts.cache.device_mode import ChosenMode, check_options_for_kernels, choose_mode
from hotexperts.cache.packed_store import check_packable
from hotexperts.config import DEFAULT_RAM_POLICY, CacheConfig
from hotexperts.errors import ConfigError
from hotexperts.formats import ExpertLayout
from hotexperts.integrations.transformers.gguf_checkpoint import from_where
from hotexperts.integrations.transformers.load import hook_loading
from hotexperts.integrations.transformers.modules import find_experts
from hotexperts.integrations.transformers.repository import read_config
from hotexperts.sizing import LayerShape, fixed_capacity
from hotexperts.transformers import attach, load

# Of a cache that is quick to make, since the experts stay where they are.
PROBE = {
    "expert_store": "file",
    "expert_ram_gib": None,
    "expert_ram_policy": DEFAULT_RAM_POLICY,
    "expert_pack": None,
    "expert_packing": "none",
    "cache_mode": "host",
    "prefetch": "off",
}


class Group(NamedTuple):
    """Sequences that are decoded together.

    Attributes:
        name: what they are about.
        prompt: ids, `[batch, tokens]`.
        show: to call before each call of the model.
    """

    name: str
    prompt: torch.Tensor
    show: Show


class Source(Protocol):
    """Gives the same model, resident or cached, and what to feed it."""

    def check(self, size: str, kv_tokens: int) -> None:
        """Refuse a size before the long part begins, where that can be known."""

    def resident(self) -> Any:
        """The model with every expert on the device, as Transformers alone has it."""

    def cached(self, size: str, kv_tokens: int) -> Any:
        """The model with a cache; `size` as `load` takes it."""

    def groups(self, model: Any, batch: int, num_tokens: int) -> list[Group]:
        """What to decode, in order."""


@dataclass(frozen=True, slots=True)
class ShapeSource:
    """A shape whose routers repeat given ids.

    Attributes:
        shape: the model's.
        device: where it computes.
        routing: the ids.
        num_groups: to decode.
        options: more for `attach`: policy, cache_mode, check_host_memory.
    """

    shape: Shape
    device: str
    routing: Routing
    num_groups: int
    options: Mapping[str, Any]

    def check(self, size: str, kv_tokens: int) -> None:
        """See `Source`; whether a budget is enough shows when the model is there."""
        if size.isdecimal():
            fixed_capacity(int(size), [LayerShape(self.shape.num_experts, self.shape.top_k, 0)])

    def resident(self) -> Any:
        """See `Source`."""
        return random_model(self.shape, self.device).to(self.device)

    def cached(self, size: str, kv_tokens: int) -> Any:
        """See `Source`."""
        return attach(
            random_model(self.shape, self.device),
            expert_cache_size=size,
            kv_tokens=kv_tokens,
            device=self.device,
            **self.options,
        )

    def groups(self, model: Any, batch: int, num_tokens: int) -> list[Group]:
        """See `Source`; row r of group g repeats sequence g * batch + r, from the first again."""
        replay = Replay(self.routing.ids, model, self.device, batch * num_tokens)
        prompt = torch.arange(num_tokens, device=self.device).repeat(batch, 1)
        return [
            Group(
                name_of(first, batch),
                prompt,
                partial(
                    replay.show_rows,
                    [(first + row) % replay.num_sequences for row in range(batch)],
                ),
            )
            for first in range(0, self.num_groups * batch, batch)
        ]


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A checkpoint that is fed texts of several domains.

    Attributes:
        path: the checkpoint's.
        texts: token ids by domain.
        options: more for `load`: device, dtype, trust_remote_code, policy, ...
    """

    path: str
    texts: Mapping[str, Sequence[int]]
    options: Mapping[str, Any]

    def check(self, size: str, kv_tokens: int) -> None:
        """See `Source`; the experts are left in the file, so that it is quick."""
        mode_beyond(self._load(size, kv_tokens, PROBE), self.options)

    def resident(self) -> Any:
        """See `Source`."""
        names = ("device", "dtype", "trust_remote_code")
        return resident_model(self.path, **{name: self.options[name] for name in names})

    def cached(self, size: str, kv_tokens: int) -> Any:
        """See `Source`."""
        return self._load(size, kv_tokens, {})

    def _load(self, size: str, kv_tokens: int, instead: Mapping[str, Any]) -> Any:
        return load(
            self.path,
            expert_cache_size=size,
            kv_tokens=kv_tokens,
            **{**self.options, **instead},
        )

    def groups(self, model: Any, batch: int, num_tokens: int) -> list[Group]:
        """See `Source`; each row begins elsewhere in its domain's text, which goes in a circle."""
        device = self.options["device"]
        return [
            Group(name, _windows(ids, batch, num_tokens).to(device), lambda position, n: None)
            for name, ids in self.texts.items()
        ]


def mode_beyond(probe: Any, options: Mapping[str, Any]) -> ChosenMode:
    """Who will manage the caches that are measured.

    Args:
        probe: loaded with `PROBE`: its own experts are in the file.
        options: what `load` will take instead.

    Raises:
        ConfigError: a cache mode, a packing or a prefetch that cannot work here, before the long
            part begins.
    """
    cache = CacheConfig(
        policy=probe.expert_cache.policy,
        store=options["expert_store"],
        mode=options["cache_mode"],
        packing=options["expert_packing"],
        prefetch=options["prefetch"],
    )
    layouts = [provider.store.layout for provider in probe.expert_cache.providers]
    return _check_mode(cache, layouts, probe.device)


def check_shape(shape: Shape, options: Mapping[str, Any]) -> None:
    """Refuse what kernels cannot do here, before any weight is drawn.

    Args:
        shape: the model's.
        options: device, policy, cache_mode, expert_packing and prefetch, as `attach` will take
            them.

    Raises:
        ConfigError: a cache mode, a packing or a prefetch that cannot work here.
    """
    cache = CacheConfig(
        policy=options["policy"],
        mode=options["cache_mode"],
        packing=options["expert_packing"],
        prefetch=options["prefetch"],
    )
    first = model_without_weights(shape.cut(shape.num_dense + 1))
    _check_mode(cache, [x.layout for x in find_experts(first)], torch.device(options["device"]))


def _check_mode(
    cache: CacheConfig, layouts: Sequence[ExpertLayout], device: torch.device
) -> ChosenMode:
    mode = choose_mode(cache, layouts, device)
    check_options_for_kernels(cache, mode)
    check_packable(cache, layouts)
    return mode


def _windows(ids: Sequence[int], batch: int, num_tokens: int) -> torch.Tensor:
    """`[batch, tokens]`, evenly spread over the text."""
    starts = [row * len(ids) // batch for row in range(batch)]
    rows = [[ids[(start + at) % len(ids)] for at in range(num_tokens)] for start in starts]
    return torch.tensor(rows)


def resident_model(
    path: str, *, device: str, dtype: str, trust_remote_code: bool, **more: Any
) -> Any:
    """A checkpoint as Transformers alone loads it, with every expert on the device.

    Args:
        path: the checkpoint's.
        device: where it computes.
        dtype: of the weights.
        trust_remote_code: run Python code of the checkpoint.
        **more: for `from_pretrained`.
    """
    trust = {"trust_remote_code": trust_remote_code}
    config, _ = read_config(path, dict(trust))
    hook_loading()  # which reads packed weights
    model_class, where = from_where(path, config)
    return model_class.from_pretrained(
        **where,
        config=config,
        dtype=dtype,
        device_map={"": device},
        use_safetensors=True,
        **trust,
        **more,
    ).eval()


def resident_or_refuse(source: Source) -> Any:
    """The resident model.

    Raises:
        ConfigError: it does not fit the GPU.
    """
    with resident_fits():
        return source.resident()


@contextmanager
def resident_fits() -> Iterator[None]:
    """Inside, every expert goes to the device.

    Raises:
        ConfigError: it has no room for them.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the resident model does not fit the GPU, and a speed is only shown beside it: give "
            "--no-resident to measure without a check and without a bound, or fewer --layers"
        ) from error


def free_memory() -> None:
    """Give back what a model took that has just gone out of scope."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
