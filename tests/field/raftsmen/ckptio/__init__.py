"""Checkpoint input and output in fixed-size chunks."""

from .chunks import ChunkArena, ChunkLease
from .loader import Loader
from .saver import Saver

__all__ = ["ChunkArena", "ChunkLease", "Loader", "Saver"]
