from .pinned import PinnedBuffer, PinnedPool
from .swapper import PartitionSwapper
from .optimizer import OffloadedAdam

__all__ = ["PinnedBuffer", "PinnedPool", "PartitionSwapper", "OffloadedAdam"]
