from .saver import AsyncSaver
from .staging import StagingArena

__all__ = ["AsyncSaver", "StagingArena"]
