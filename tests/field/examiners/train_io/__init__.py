"""Input side of a trainer: arenas of host slabs, shard readers and a loader."""
from .loader import Loader
from .reader import ShardReader
from .slabs import SlabArena, SlabGuard

__all__ = ["Loader", "ShardReader", "SlabArena", "SlabGuard"]
