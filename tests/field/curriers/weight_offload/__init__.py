from .pinned import PinnedPool
from .swapper import LayerSwapper
from .writer import SpillWriter
