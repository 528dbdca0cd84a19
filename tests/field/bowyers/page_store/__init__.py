"""Page-oriented store for offline feature tables."""
from .buffers import BufferPool, Frame
from .btree import BTree

__all__ = ["BufferPool", "Frame", "BTree"]
