from .client import ObjectClient, ObjectView
from .prefetch import EpochPrefetcher, Prefetcher
from .spill import Spiller
from .store import ObjectStore

__all__ = ["EpochPrefetcher", "ObjectClient", "ObjectStore", "ObjectView", "Prefetcher", "Spiller"]
