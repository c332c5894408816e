"""Device kernels, one folder an operation: `naive.py` says what, `triton.py` does it fast."""
