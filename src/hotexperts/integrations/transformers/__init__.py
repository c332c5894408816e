"""Stock Hugging Face Transformers with an expert cache: `load`, `attach`, `install`, `pack`."""

from hotexperts.integrations.transformers.api import attach, install, load
from hotexperts.integrations.transformers.handle import ExpertCache
from hotexperts.integrations.transformers.packing import pack

__all__ = ["ExpertCache", "attach", "install", "load", "pack"]
