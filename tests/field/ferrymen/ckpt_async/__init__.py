"""Asynchronous sharded checkpoints: device -> pinned staging -> files."""
from .staging import Region, StagingArena, staged
from .writer import ShardWriter, SaveJob
from .restore import Restorer

__all__ = ["Region", "StagingArena", "staged", "ShardWriter", "SaveJob", "Restorer"]
