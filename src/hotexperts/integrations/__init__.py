"""Engines: each integration hooks into a stock engine and talks to `cache`."""
