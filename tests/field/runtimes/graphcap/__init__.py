"""CUDA graph capture with private memory pools."""
from .cache import GraphCache
from .mempool import MemPoolRegistry
from .runner import GraphRunner

__all__ = ["GraphCache", "GraphRunner", "MemPoolRegistry"]
