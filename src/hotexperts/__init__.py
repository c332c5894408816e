"""hotexperts: Mixture-of-Experts models bigger than the GPU, through a cache of expert slots."""

from importlib.metadata import version

__version__ = version("hotexperts")
__all__ = ["__version__"]
