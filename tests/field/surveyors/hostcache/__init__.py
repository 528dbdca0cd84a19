from .engine import HostCacheEngine
from .memory import HostAllocator, MemoryObj
from .storage import LocalDiskBackend, LocalHostBackend

__all__ = ["HostAllocator", "HostCacheEngine", "LocalDiskBackend", "LocalHostBackend", "MemoryObj"]
