"""vLLM in this process on random weights: slots and routing change as it runs."""
