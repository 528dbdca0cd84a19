"""Data loader whose workers hand batches over in shared memory segments."""
from .loader import SharedLoader
from .segments import Segment, SegmentTable
from .worker import Worker

__all__ = ["Segment", "SegmentTable", "SharedLoader", "Worker"]
