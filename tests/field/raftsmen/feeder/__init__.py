"""Device-side prefetching of training batches."""
from .prefetch import Prefetcher
from .ring import DeviceRing
from .trainer import Trainer

__all__ = ["DeviceRing", "Prefetcher", "Trainer"]
