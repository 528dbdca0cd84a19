"""Context parallel serving of million token requests."""
from .engine import ContextEngine, LongRequest
from .ringpass import RingPasser
from .slots import EpochSlots, GuardedSlots, SegmentHeap

__all__ = ["ContextEngine", "LongRequest", "RingPasser", "EpochSlots", "GuardedSlots", "SegmentHeap"]
