from .adam import OffloadedAdam
from .arena import Extent, HostArena
from .swapper import StateSwapper

__all__ = ["Extent", "HostArena", "OffloadedAdam", "StateSwapper"]
