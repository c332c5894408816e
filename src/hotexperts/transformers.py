"""Stock Hugging Face Transformers with an expert cache: `load`, `attach`, `install`."""

from hotexperts.integrations.transformers import ExpertCache, attach, install, load

__all__ = ["ExpertCache", "attach", "install", "load"]
