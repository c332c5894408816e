"""Stock Hugging Face Transformers with an expert cache: `load`, `attach`, `install`, `pack`."""

from hotexperts.integrations.transformers import ExpertCache, attach, install, load, pack

__all__ = ["ExpertCache", "attach", "install", "load", "pack"]
