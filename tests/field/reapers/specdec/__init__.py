"""Speculative decoding: draft trees, draft lanes, batched verification."""
from .draft import DraftWorker, LanePool
from .engine import SpecEngine
from .tree import ArenaFull, NodeArena, TokenTree

__all__ = ["ArenaFull", "DraftWorker", "LanePool", "NodeArena", "SpecEngine", "TokenTree"]
