"""Embedding service: tokenise, batch, run, index."""
from .handlers import Handlers
from .pools import ArenaPool, ClientPool, open_pools

__all__ = ["ArenaPool", "ClientPool", "Handlers", "open_pools"]
