"""Checkpoint upload and download through an arena of chunks."""
from .arena import ChunkArena
from .reader import CheckpointReader
from .writer import CheckpointWriter

__all__ = ["ChunkArena", "CheckpointReader", "CheckpointWriter"]
