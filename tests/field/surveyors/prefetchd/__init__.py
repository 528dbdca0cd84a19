from .arena import ShmArena, ShmBlock
from .loader import PrefetchLoader
from .worker import BatchWorker

__all__ = ["BatchWorker", "PrefetchLoader", "ShmArena", "ShmBlock"]
