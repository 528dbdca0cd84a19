from .engine import Engine
from .pool import PagePool
from .prefix import PrefixTree
from .sequence import Sequence

__all__ = ["Engine", "PagePool", "PrefixTree", "Sequence"]
