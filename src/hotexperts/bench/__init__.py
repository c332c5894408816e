"""Measuring a cached model: shapes, replayed routing, timed steps, and what bounds them."""
