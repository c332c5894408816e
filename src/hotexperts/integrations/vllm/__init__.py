"""The vLLM plug-in: `vllm serve MODEL --moe-expert-cache-size N` on stock vLLM.

Nothing here imports vLLM or torch until vLLM itself has imported the module that is patched.
"""
