from .controller import HiCacheController
from .host import HostArena
from .radix import RadixTree

__all__ = ["HiCacheController", "HostArena", "RadixTree"]
