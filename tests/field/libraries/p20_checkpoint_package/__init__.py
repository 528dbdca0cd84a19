"""Asynchronous checkpoint writing through attached staging segments."""
from .manager import CheckpointManager
from .segments import Segment, SegmentPool
from .writer import AsyncWriter, WriteRequest

__all__ = ["CheckpointManager", "Segment", "SegmentPool", "AsyncWriter", "WriteRequest"]
