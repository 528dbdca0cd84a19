"""Sequence parallelism by all-to-all over heads."""
