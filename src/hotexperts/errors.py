"""What can go wrong, by who has to act.

Every error here is also the builtin that a caller would expect, and its message says what came,
what was wanted and which knob to turn.
"""


class HotExpertsError(Exception):
    """Base of every error that hotexperts raises on purpose."""


class ConfigError(HotExpertsError, ValueError):
    """An option has a value that cannot take effect."""


class UnknownNameError(ConfigError):
    """A policy (or other plug-in) of that name does not exist."""


class ExpertCacheOverflow(HotExpertsError, RuntimeError):  # noqa: N818 (vLLM PR #37190's name)
    """One call needs more distinct experts than the cache has slots."""

    def __init__(self, num_needed: int, capacity: int) -> None:
        super().__init__(
            f"{num_needed} distinct experts needed in one call, {capacity} slots: "
            "raise the expert cache size, lower the batch, or call waves() instead of prepare()"
        )
        self.num_needed = num_needed
        self.capacity = capacity


class ConcurrentUseError(HotExpertsError, RuntimeError):
    """Two threads entered the same provider; a provider serves one at a time."""


class RanksDifferError(HotExpertsError, RuntimeError):
    """Processes that share each expert made different decisions from what should be equal ids."""


class CheckpointError(HotExpertsError, ValueError):
    """A checkpoint file is missing, truncated, corrupt or not what the model needs."""


class UnsupportedModelError(HotExpertsError, ValueError):
    """The model's experts have a form that hotexperts does not know; the class is named."""


class UnsupportedOperationError(HotExpertsError, RuntimeError):
    """The operation would break a model whose experts live in the cache (training, saving, ...)."""


class StorageError(HotExpertsError, OSError):
    """A disk does not give or take what is asked of it: it is full, faulty or not ours to use."""


class HostMemoryError(HotExpertsError, MemoryError):
    """The host has not enough memory, or may not page-lock as much."""
