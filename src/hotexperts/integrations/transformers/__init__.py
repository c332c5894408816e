"""Stock Hugging Face Transformers with an expert cache: `load`, `attach`, `install`."""

from hotexperts.integrations.transformers.api import attach, install, load
from hotexperts.integrations.transformers.handle import ExpertCache

__all__ = ["ExpertCache", "attach", "install", "load"]
