"""Artifact fetcher: pooled connections, sessions on top, and temp files that are moved into place."""
from .conns import ConnPool
from .fetch import Fetcher

__all__ = ["ConnPool", "Fetcher"]
