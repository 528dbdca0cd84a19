from .pinned import PinnedArena, StreamPool
from .swapper import LayerSwapper, StagingScope

__all__ = ["LayerSwapper", "PinnedArena", "StagingScope", "StreamPool"]
