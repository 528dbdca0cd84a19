"""Asynchronous checkpoint writer: staging chunks, descriptor slots, shard files and a manifest."""
from .fds import DescriptorSlots
from .staging import Chunk, ChunkScope, StagingRing
from .writer import BackgroundWriter, ShardWriter

__all__ = ["BackgroundWriter", "Chunk", "ChunkScope", "DescriptorSlots", "ShardWriter", "StagingRing"]
