from .backends import DiskBackend, HostBackend
from .engine import CacheEngine
from .memory import MemoryAllocator, MemoryObj

__all__ = ["CacheEngine", "DiskBackend", "HostBackend", "MemoryAllocator", "MemoryObj"]
