"""Attention modules as people write them before they know of a pool: what `poolaudit adopt` is for."""
