"""Continuous-batching scheduler core."""
