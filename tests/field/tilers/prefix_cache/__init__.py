from .manager import PrefixCacheManager
from .radix import RadixNode, RadixTree
from .sessions import Session, fork_request

__all__ = ["PrefixCacheManager", "RadixNode", "RadixTree", "Session", "fork_request"]
