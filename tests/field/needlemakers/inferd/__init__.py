"""Small continuous-batching server: pools, request objects, scheduler."""
from .engine import Engine
from .pools import BlockPool, LogitsPool
from .request import Request

__all__ = ["BlockPool", "Engine", "LogitsPool", "Request"]
