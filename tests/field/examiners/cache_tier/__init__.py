"""Two tier prefix cache: memory objects in RAM, spilled pages on disk."""
from .engine import CacheEngine
from .memory import MemoryManager
from .disk import SpillDir

__all__ = ["CacheEngine", "MemoryManager", "SpillDir"]
