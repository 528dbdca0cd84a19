from .batch import Req, Scheduler
from .pool import ReqSlots, TokenPool
from .tree import RadixTree

__all__ = ["RadixTree", "Req", "ReqSlots", "Scheduler", "TokenPool"]
