"""Streams checkpoint shards through a few chunk buffers onto the device while serving goes on."""
from .chunks import ChunkPool, StagedChunk
from .loader import ShardLoader
from .publisher import Publisher

__all__ = ["ChunkPool", "Publisher", "ShardLoader", "StagedChunk"]
