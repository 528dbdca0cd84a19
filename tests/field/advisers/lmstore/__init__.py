from .manager import StorageManager
from .memory import MemoryObj, PinnedMemoryAllocator

__all__ = ["MemoryObj", "PinnedMemoryAllocator", "StorageManager"]
