from .manager import CheckpointManager
from .staging import StagingPool
from .writer import ShardWriter

__all__ = ["CheckpointManager", "StagingPool", "ShardWriter"]
