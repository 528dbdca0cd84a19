"""Scatter-gather in front of a sharded vector index."""
from shardgate.router import Router

__all__ = ["Router"]
