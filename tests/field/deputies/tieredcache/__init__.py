from .engine import CacheEngine
from .tiers import DiskTier, HostTier

__all__ = ["CacheEngine", "DiskTier", "HostTier"]
