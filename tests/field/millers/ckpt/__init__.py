from .manifest import Manifest, StepLock
from .restore import ShardReader, load_state
from .staging import StagingArena
from .writer import AsyncWriter, ShardWriter, save_state

__all__ = ["AsyncWriter", "Manifest", "ShardReader", "ShardWriter", "StagingArena", "StepLock", "load_state", "save_state"]
