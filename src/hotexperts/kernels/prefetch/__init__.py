"""Prefetch: guessed rows are copied while the link is idle, before their layer asks for them."""
