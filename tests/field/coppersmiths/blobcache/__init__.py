from .extents import allocate_extent, free_extent, extents_left
from .conn import PeerPool
from .store import BlobStore
from .replicate import Replicator

__all__ = ["allocate_extent", "free_extent", "extents_left", "PeerPool", "BlobStore", "Replicator"]
