from .arena import ShmArena
from .loader import FeedLoader
from .worker import CollateWorker

__all__ = ["ShmArena", "CollateWorker", "FeedLoader"]
