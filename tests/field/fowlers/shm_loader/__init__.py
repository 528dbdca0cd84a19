"""A data loader whose workers hand batches over through shared memory."""
from .loader import ShmLoader
from .ring import ShmRing

__all__ = ["ShmLoader", "ShmRing"]
