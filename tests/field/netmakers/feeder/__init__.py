"""Feeds packed token batches to the trainer through a pinned arena."""
from .arena import Arena
from .batcher import Packer
from .prefetch import Prefetcher

__all__ = ["Arena", "Packer", "Prefetcher"]
