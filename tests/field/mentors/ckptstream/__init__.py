from .manager import CheckpointManager
from .staging import StagingArena
from .writer import ShardWriter

__all__ = ["CheckpointManager", "ShardWriter", "StagingArena"]
