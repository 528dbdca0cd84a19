from .manager import StorageManager
from .memory import HostArena, MemoryObj

__all__ = ["HostArena", "MemoryObj", "StorageManager"]
