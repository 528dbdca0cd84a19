"""Three-tier KV page store: device arena, pinned host memory, NVMe slab."""
from .manager import PageManager
from .mover import TierMover

__all__ = ["PageManager", "TierMover"]
