from .arena import PinnedArena
from .writer import ShardWriter

__all__ = ["PinnedArena", "ShardWriter"]
