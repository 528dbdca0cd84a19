from .handles import HandleCache, ShardHandle
from .loader import ShardLoader
from .prefetch import ByteBudget, Prefetcher

__all__ = ["ByteBudget", "HandleCache", "Prefetcher", "ShardHandle", "ShardLoader"]
