"""Versions of the engines that hotexperts is tested with, or whose sources were checked."""

TRANSFORMERS = ("5.17", "5.24")
VLLM = ("0.26", "0.27", "0.32", "0.33")
