"""hotexperts: Mixture-of-Experts models bigger than the GPU, through a cache of expert slots."""

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("hotexperts")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
