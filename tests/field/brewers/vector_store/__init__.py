from .segments import Segment, SegmentTable
from .reader import Searcher
from .compactor import Compactor

__all__ = ["Segment", "SegmentTable", "Searcher", "Compactor"]
