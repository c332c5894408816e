"""An OpenAI-compatible server: vLLM's with the plug-in, or Transformers' own behind a gate.

`gate.py` meets every request first, and lets through what `requests.py` has checked, to the
handlers of Transformers (`app.py`); `turns.py` generates, one answer after another.
"""
