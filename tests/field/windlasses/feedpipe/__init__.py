"""Shard reader -> shuffler -> batcher, over one pool of decode chunks."""
from .batch import Batcher
from .chunks import Chunk, ChunkPool, pooled
from .reader import ShardReader
from .shuffle import ShuffleWindow

__all__ = ["Batcher", "Chunk", "ChunkPool", "ShardReader", "ShuffleWindow", "pooled"]
