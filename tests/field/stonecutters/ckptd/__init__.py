"""Checkpoint daemon: receives shards from workers and writes them out."""
from .coordinator import Coordinator
from .spool import SpoolFiles, WriteSlots
from .writer import ShardWriter

__all__ = ["Coordinator", "ShardWriter", "SpoolFiles", "WriteSlots"]
