from .engine import TieredEngine
from .index import TierIndex
from .memory import HostArena, PageAllocator

__all__ = ["HostArena", "PageAllocator", "TierIndex", "TieredEngine"]
