"""Ring collectives with token flow control."""
from .channel import Channel, ChannelSet
from .collective import RingAllReduce
from .tokens import TokenRing
from .tiles import TileCache, tile

__all__ = ["Channel", "ChannelSet", "RingAllReduce", "TileCache", "TokenRing", "tile"]
