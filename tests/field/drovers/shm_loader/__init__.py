from .segments import Segment, SegmentTable
from .workers import WorkerPool
from .loader import ShmLoader

__all__ = ["Segment", "SegmentTable", "WorkerPool", "ShmLoader"]
